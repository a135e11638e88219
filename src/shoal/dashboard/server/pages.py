"""The files of the page: those that were there when the server began, by their exact names, and nothing else."""

from pathlib import Path

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
}
FOLDER = Path(__file__).resolve().parents[1] / "page"


def list_pages(folder: Path = FOLDER) -> dict[str, Path]:
    """The files by their addresses: what a request says is looked up and never joined to a path."""
    if not folder.is_dir():
        return {}
    found = {
        f"/page/{path.relative_to(folder).as_posix()}": path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink() and path.suffix in _TYPES
    }
    if "/page/index.html" in found:
        found["/"] = found["/page/index.html"]
    return found


def type_of(path: Path) -> str:
    """The content type of a file."""
    return _TYPES[path.suffix]
