"""Everything that the gateway promises holds with a network between it and its agent, too: the same tests."""

from __future__ import annotations

from gateway.test_inference_protocol import *  # noqa: F403
from gateway.test_openai_endpoints import *  # noqa: F403
from gateway.test_uploads import *  # noqa: F403
from gateway.test_waiting import *  # noqa: F403
