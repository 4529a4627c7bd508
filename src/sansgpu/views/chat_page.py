"""The page of `sansgpu serve` to chat with the model: one static file, which loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass

from sansgpu.views.page import templates


@dataclass(frozen=True)
class ChatPage:
    """The page, and the headers with which a browser runs only the page's own script and style."""

    html: str
    headers: dict[str, str]

    @classmethod
    def load(cls) -> ChatPage:
        html = templates().get_template("chat.html").render()
        policy = (
            f"default-src 'none'; script-src {_hash(html, 'script')}; style-src {_hash(html, 'style')}; "
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }
        return cls(html, headers)


def _hash(html: str, element: str) -> str:
    """Returns the source expression that allows the content of the page's only such element."""
    (content,) = re.findall(rf"<{element}>(.*?)</{element}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
