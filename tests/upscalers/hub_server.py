"""A hub in this process: answers to huggingface_hub's client."""

import sys
import threading
from typing import Any

from hub import repositories
from hub.repositories import OWNER, TOKEN, Fault, Repository, files_of
from huggingface_hub.utils import get_session
from huggingface_hub.utils._http import hf_request_event_hook

__all__ = ["OWNER", "TOKEN", "Fault", "Hub", "Repository", "files_of"]

# httpx, or httpx2 with newer versions of huggingface_hub.
http = sys.modules[type(get_session()).__module__.partition(".")[0]]

_LONGEST_SILENCE = 60  # seconds


class Hub(repositories.Hub):
    """A Hub whose clients are in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.breaks_silence = threading.Event()  # for which a silent answer waits

    def client(self) -> Any:
        hooks = {"request": [hf_request_event_hook]}  # which refuses requests where the client is offline
        return http.Client(transport=http.MockTransport(self._respond), event_hooks=hooks, follow_redirects=True)

    def _respond(self, request: Any) -> Any:
        address, headers = request.url, {name.lower(): value for name, value in request.headers.items()}
        asked = (request.method, address.path, address.query.decode(), headers, request.read())
        answer = self.answer(*asked)
        if answer.fault is not None and answer.fault.silent:
            assert self.breaks_silence.wait(_LONGEST_SILENCE)
        if answer.fault is not None and answer.fault.cut_after is not None:
            raise http.RemoteProtocolError("the connection was cut", request=request)
        content = {} if request.method == "HEAD" else {"content": answer.body}
        return http.Response(answer.status, headers=dict(answer.headers), **content)
