"""Chromium and its driver for `make test-browser`: installed where apt-get can, else one sentence what to install."""

import os
import shutil
import subprocess
import sys

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def there() -> bool:
    return any(map(shutil.which, CHROMIUM)) and shutil.which("chromedriver") is not None


def install() -> bool:
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return False
    print("installing chromium and chromium-driver ...", flush=True)
    packages = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", "chromium", "chromium-driver"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return all(
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False).returncode == 0
        for command in (["apt-get", "update", "-qq"], packages)
    )


if __name__ == "__main__" and not there() and not (install() and there()):
    sys.exit(
        "the page's tests need Chromium and the chromedriver of its version on the PATH "
        "(Debian, as root: apt-get install chromium chromium-driver)"
    )
