"""Lists what is installed for serving alone, largest first: ``python -m tools.installed``."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement


def installed(root: str = "farsight") -> dict[str, int]:
    """Returns the bytes of each distribution that ``root`` requires here, directly or not, without its extras."""
    found: dict[str, int] = {}
    waiting = [Requirement(root)]
    seen: set[tuple[str, str]] = set()
    while waiting:
        wanted = waiting.pop()
        for extra in ("", *sorted(wanted.extras)):
            if (wanted.name.lower(), extra) in seen:
                continue
            seen.add((wanted.name.lower(), extra))
            try:
                package = distribution(wanted.name)
            except PackageNotFoundError:  # of another platform, or an extra that is not here
                continue
            files = (Path(str(package.locate_file(file))) for file in package.files or ())
            name = package.metadata["Name"].lower().replace("_", "-")
            found[name] = sum(path.stat().st_size for path in files if path.is_file())
            each = map(Requirement, package.requires or ())
            waiting += [one for one in each if one.marker is None or one.marker.evaluate({"extra": extra})]
    found.pop(root)
    return found


def main() -> None:
    """Prints a table of Markdown: what takes 10 MB or more by name, the rest as one row."""
    sizes = sorted(installed().items(), key=lambda each: -each[1])
    large = [(name, size) for name, size in sizes if size >= 10e6]
    rest = sizes[len(large) :]
    print("| package | MB |\n|---|---|")
    for name, size in [*large, (f"{len(rest)} others", sum(size for _, size in rest))]:
        print(f"| {name} | {size / 1e6:.0f} |")
    print(f"| all {len(sizes)} | {sum(size for _, size in sizes) / 1e6:.0f} |")


if __name__ == "__main__":
    main()
