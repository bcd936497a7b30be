"""Exit with 0 if this interpreter already has what the scripts would install.

Usage: python launch/satisfied.py EXTRA, in the root of the checkout. It checks the requirements
of setup.cfg and of its EXTRA, and every version pinned in constraints.txt.
"""

import configparser
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def unmet(extra: str) -> bool:
    from packaging.requirements import Requirement

    config = configparser.ConfigParser()
    config.read("setup.cfg")
    needed = config["options"]["install_requires"] + config["options.extras_require"][extra]
    pinned = Path("constraints.txt").read_text(encoding="utf-8")
    lines = [(line, True) for line in needed.splitlines()]
    lines += [(line, False) for line in pinned.splitlines()]
    for line, required in lines:
        if not line or line.startswith("#"):
            continue
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate():
            continue
        try:
            if not requirement.specifier.contains(version(requirement.name), prereleases=True):
                return True
        except PackageNotFoundError:
            if required:
                return True
    return False


if __name__ == "__main__":
    try:
        sys.exit(sys.version_info < (3, 11) or unmet(sys.argv[1]))
    except ImportError:  # packaging comes with accelerate
        sys.exit(1)
