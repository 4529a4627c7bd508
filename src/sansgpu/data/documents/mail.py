"""Reads e-mail: single messages (.eml) and mailboxes (.mbox), with the standard library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from pathlib import Path

from sansgpu.data.documents.content import open_content, read_content
from sansgpu.data.documents.document import Document, UnreadableError, numbered
from sansgpu.data.documents.html import decoded, html_text
from sansgpu.data.documents.text import cleaned

MAX_MESSAGE = 128 << 20  # bytes of a message with its attachments
HEADERS = ("Subject", "From", "To", "Date")
FORWARDED = "message/rfc822"  # type of a part that is a message


def read_eml(path: Path) -> Document:
    """Reads one message. Raises UnreadableError."""
    content = read_content(path, MAX_MESSAGE, "remove its attachments")
    if not _starts_message(content):
        raise UnreadableError("is not an e-mail message; it has no header")
    return _document([content], separate=False)


def read_mbox(path: Path) -> Document:
    """Reads a mailbox, whose messages are documents of their own. Raises UnreadableError."""
    return _document(_messages(path), separate=True)


def _document(messages: Iterator[bytes] | list[bytes], separate: bool) -> Document:
    left_out: Counter[str] = Counter()
    texts = [_text(message, left_out) for message in messages]
    return Document("message", numbered(texts), separate=separate, left_out=dict(+left_out))


def _messages(path: Path) -> Iterator[bytes]:
    """Yields the messages of a mailbox. Each begins with a line "From ", which is after an empty line."""
    lines: list[bytes] = []
    size, after_empty = 0, True
    with open_content(path) as file:
        if file.read(5) != b"From ":
            raise UnreadableError('is not a mailbox; it does not begin with "From "')
        file.seek(0)
        for line in file:
            if after_empty and line.startswith(b"From "):
                if lines:
                    yield b"".join(lines)
                lines, size = [], 0
            else:
                lines.append(line.removeprefix(b">") if line.lstrip(b">").startswith(b"From ") else line)
                size += len(line)
                if size > MAX_MESSAGE:
                    raise UnreadableError(f"has a message of more than {MAX_MESSAGE >> 20} MB; remove it")
            after_empty = not line.strip()
    if lines:
        yield b"".join(lines)


def _starts_message(content: bytes) -> bool:
    name, colon, _ = content[:1000].lstrip().partition(b":")
    return bool(colon) and name.replace(b"-", b"").isalnum()


def _text(content: bytes, left_out: Counter[str]) -> str:
    """Returns the text of a message, and of the messages that are forwarded with it."""
    message = message_from_bytes(content, policy=default)
    parts = [part for part in message.walk() if isinstance(part, EmailMessage)]
    for part in parts:
        if part.get_content_maintype() == "multipart" and not part.is_multipart():
            del part["Content-Type"]  # its boundary does not occur, so it is a plain text
    forwarded = list[EmailMessage]()
    for part in parts:
        found = _forwarded(part)
        forwarded += found
        left_out["attachment"] += not found and (part.is_attachment() or part.get_content_type() == FORWARDED)
    return "\n\n".join(_message_text(one) for one in (*parts[:1], *forwarded))


def _forwarded(part: EmailMessage) -> list[EmailMessage]:
    """Returns the message that a part consists of. An encoded one, which the standard does not allow, is not read."""
    is_encoded = str(part.get("Content-Transfer-Encoding", "")).lower() in ("base64", "quoted-printable")
    inner = part.iter_parts() if part.get_content_type() == FORWARDED and not is_encoded else ()
    return [one for one in inner if isinstance(one, EmailMessage)]


def _message_text(message: EmailMessage) -> str:
    """Returns the subject, sender, receiver, date and text of a message, without those of forwarded ones."""
    headers = []
    for name in HEADERS:
        try:
            value = message.get(name)
        except Exception:  # the parser of headers raises many errors on broken ones
            continue
        if value and str(value).strip():
            headers.append(f"{name}: {' '.join(str(value).split())}")
    body = message.get_body(("plain", "html"))
    text = _body_text(body) if isinstance(body, EmailMessage) else ""
    return cleaned("\n".join(headers) + "\n\n" + text)


def _body_text(body: EmailMessage) -> str:
    content = body.get_payload(decode=True)
    text = decoded(content, body.get_content_charset()) if isinstance(content, bytes) else ""
    return html_text(text) if body.get_content_subtype() == "html" else text
