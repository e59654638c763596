"""The HTTP side: OpenAI-compatible and Open Inference Protocol endpoints, the admin API, metrics and the live page.

It talks to the agent only through `protocol.dispatch.Backend` and `protocol.admin.Admin`, whether that runs in the same
process or elsewhere. `app.create_app` makes the application, `app.serve` listens with it.
"""
