"""Where this agent fetches from: what its pool says, and beyond that what its own environment says.

The pool's authorities, logins and token are files of one folder: on one machine the controller writes them, in a pod
the kubelet does. They are read anew for each fetch, so that a change of a secret counts without a restart.
"""

from __future__ import annotations

import netrc
import os
import ssl
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import aiohttp

if TYPE_CHECKING:
    from omnimodel.api import PoolSources

CERTIFICATES, NETRC, HUB_TOKEN = "ca.crt", "netrc", "hub-token"
FOLDER_VARIABLE = "OMNI_SOURCES_DIR"  # the operator sets it for pods

Variables = dict[str, str | None]  # None takes a variable away

# What the index of a pool replaces, for else both would be asked.
_INDEX_VARIABLES = (
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "PIP_FIND_LINKS", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL"),
    *("UV_DEFAULT_INDEX", "UV_INDEX", "UV_NO_INDEX", "UV_FIND_LINKS"),
)


class Origins:
    """See the module.

    Args:
        folder: of the files; none of them has to be there.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._said: PoolSources | None = None

    def follow(self, said: PoolSources | None) -> None:
        """Fetch from where a pool says, from now on."""
        self._said = said

    def _file(self, name: str) -> Path | None:
        path = self.folder / name if self.folder is not None else None
        return path if path is not None and path.is_file() else None

    def variables(self) -> Variables:
        """What pip, uv and the hub's library need in their environment."""
        found: Variables = {}
        if self._said is not None:
            found |= _indexes(self._said)
            if self._said.hub_endpoint is not None:
                found["HF_ENDPOINT"] = self._said.hub_endpoint
        for name, value in self._proxies().items():
            found[name] = found[name.upper()] = value
        if (authorities := self._file(CERTIFICATES)) is not None:
            # By the words of OpenSSL, pip, requests, and uv, which else would take the system's.
            for name in ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
                found[name] = str(authorities)
            found["UV_SYSTEM_CERTS"] = None
        if (logins := self._file(NETRC)) is not None:
            found["NETRC"] = str(logins)
        if (token := self._file(HUB_TOKEN)) is not None:
            found["HF_TOKEN"] = token.read_text().strip()
        return found

    def _proxies(self) -> Mapping[str, str]:
        proxy = self._said.proxy if self._said is not None else None
        if proxy is None:
            return {}
        said = {"http_proxy": proxy.http, "https_proxy": proxy.https, "no_proxy": ",".join(proxy.no_proxy)}
        return {name: value for name, value in said.items() if value}

    def proxy(self, url: str) -> str | None:
        """The proxy for a URL: the pool's, else that of the environment."""
        said = self._said.proxy if self._said is not None else None
        if said is None:
            proxies, without = urllib.request.getproxies(), None
        else:
            proxies = {scheme: value for scheme, value in (("http", said.http), ("https", said.https)) if value}
            without = {"no": ",".join(said.no_proxy)}
        parts = urlsplit(url)
        if urllib.request.proxy_bypass_environment(parts.hostname or "", without):  # type: ignore[attr-defined]
            return None
        return proxies.get(parts.scheme)

    def tls(self) -> ssl.SSLContext | bool:
        """Whom to trust: the pool's authorities, else those of the system."""
        authorities = self._file(CERTIFICATES)
        return ssl.create_default_context(cafile=str(authorities)) if authorities is not None else True

    def login(self, url: str) -> dict[str, str]:
        """The header that logs in at a URL's host; nothing where there is no login for it."""
        logins = self._file(NETRC) or Path(os.environ.get("NETRC") or Path.home() / ".netrc")
        try:
            found = netrc.netrc(str(logins)).authenticators(urlsplit(url).hostname or "")
        except (OSError, netrc.NetrcParseError):
            return {}
        return {"Authorization": aiohttp.encode_basic_auth(found[0], found[2] or "")} if found else {}


def _indexes(said: PoolSources) -> Variables:
    if said.package_index is None:
        return {}
    urls = [said.package_index, *said.extra_package_indexes]
    found: Variables = dict.fromkeys(_INDEX_VARIABLES)
    found |= {"PIP_INDEX_URL": urls[0], "UV_DEFAULT_INDEX": urls[0]}
    if urls[1:]:
        found |= {"PIP_EXTRA_INDEX_URL": " ".join(urls[1:]), "UV_INDEX": " ".join(urls[1:])}
    plain = [urlsplit(url).netloc for url in urls if url.startswith("http://")]
    if plain:  # whoever writes http means it; pip wants it said twice
        found["PIP_TRUSTED_HOST"] = " ".join(plain)
    return found


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Make these the files of a folder of origins, for this user only.

    Args:
        folder: made when it is not there.
        files: content by `CERTIFICATES`, `NETRC` and `HUB_TOKEN`.
    """
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    for name in (CERTIFICATES, NETRC, HUB_TOKEN):
        if name not in files:
            (folder / name).unlink(missing_ok=True)
            continue
        part = folder / f".{name}.part"
        part.unlink(missing_ok=True)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(files[name])
        part.replace(folder / name)
