"""Opens the ZIP archives that are Office, OpenDocument and EPUB files, and parses XML in them, within limits."""

from __future__ import annotations

import posixpath
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

from sansgpu.data.documents.content import open_content
from sansgpu.data.documents.document import UnreadableError

MAX_TEXT_BYTES = 256 << 20  # maximum bytes that are unpacked from one archive
OLD_OFFICE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"  # the start of .doc files, and of .docx files with a password
Element = ElementTree.Element
_DOCTYPE = re.compile(rb"<!\s*(?:DOCTYPE|ENTITY)", re.IGNORECASE)


class Archive:
    """The members of a ZIP archive. Raises UnreadableError if they unpack to too much, or are not valid XML."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive, self._left = archive, MAX_TEXT_BYTES
        self.names = set(archive.namelist())

    def read(self, name: str) -> bytes:
        """Returns the content of a member, whatever size its header claims. Raises UnreadableError."""
        try:
            with self._archive.open(name) as member:
                content = member.read(self._left + 1)
        except KeyError:
            raise UnreadableError(f"has no {name}; save it again with the program that made it") from None
        except RuntimeError:  # zipfile's error for members with a password
            raise UnreadableError("is encrypted; save it without a password") from None
        self._left -= len(content)
        if self._left < 0:
            raise UnreadableError(
                f"unpacks to more than {MAX_TEXT_BYTES >> 20} MB of text, like a decompression bomb; split it"
            )
        return content

    def xml(self, name: str) -> Element:
        """Parses a member without entities of its own, so that nothing is expanded or loaded."""
        content = self.read(name)
        if _DOCTYPE.search(content[:4096].replace(b"\0", b"")):
            raise UnreadableError(f"declares XML entities in {name}, which may be an attack; save it again")
        return ElementTree.fromstring(content)

    def targets(self, name: str) -> dict[str, tuple[str, str]]:
        """Returns the relations of a member of an Office file: id -> (last word of the type, member)."""
        folder, file = posixpath.split(name)
        path = f"{folder}/_rels/{file}.rels"
        found = {}
        for relation in self.xml(path) if path in self.names else ():
            target = relation.get("Target", "")
            if relation.get("TargetMode") != "External":
                found[relation.get("Id", "")] = (relation.get("Type", "").rpartition("/")[2], inside(folder, target))
        return found


def inside(folder: str, target: str) -> str:
    """Returns the name of the member that a link in `folder` points to."""
    target = unquote(target.partition("#")[0])
    return target[1:] if target.startswith("/") else posixpath.normpath(posixpath.join(folder, target))


@contextmanager
def open_archive(path: Path, kind: str) -> Iterator[Archive]:
    """Opens a file of this kind, e.g. "a Word file". Raises UnreadableError, also for errors while it is read."""
    with open_content(path) as file:
        if file.read(len(OLD_OFFICE)) == OLD_OFFICE:
            raise UnreadableError(
                f"is encrypted, or in a format older than that of {kind}; save it again without a password"
            )
        try:
            with zipfile.ZipFile(file) as archive:
                yield Archive(archive)
        except (zipfile.BadZipFile, ElementTree.ParseError, NotImplementedError, EOFError, zlib.error) as error:
            raise UnreadableError(f"is not {kind}, or damaged ({error}); save or download it again") from None


def local(element: Element) -> str:
    """Returns the name of an element without its namespace."""
    return str(element.tag).rpartition("}")[2]


def attribute(element: Element, name: str) -> str | None:
    """Returns an attribute, whatever its namespace."""
    return next((value for key, value in element.attrib.items() if key.rpartition("}")[2] == name), None)


def children(element: Element, *path: str) -> Iterator[Element]:
    """Yields the descendants at a path of names without namespaces."""
    first, *rest = path
    for child in element:
        if local(child) == first:
            if rest:
                yield from children(child, *rest)
            else:
                yield child
