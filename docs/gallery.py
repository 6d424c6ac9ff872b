"""Runs the commands of gallery.md and replaces its pictures: `python docs/gallery.py`, from the
project's root."""

from __future__ import annotations

import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
RENAMED = {"compare": "curves"}  # the picture's name: the report's name of it
WIDTH = 1100  # pixels at most: enough for a page, and small in the repository


def main() -> None:
    page = (HERE / "gallery.md").read_text().replace("\\\n", " ")
    commands = [
        line
        for block in re.findall(r"^```\n(.*?)^```", page, re.M | re.S)
        for line in block.splitlines()
    ]
    with tempfile.TemporaryDirectory() as folder:
        for line in commands:
            words = shlex.split(line)[1:]
            subprocess.run(
                [sys.executable, "-m", "fedjax_sim", *words],
                cwd=folder,
                check=True,
                stdout=subprocess.DEVNULL,
            )
        for name in re.findall(r"\]\(images/(\w+)\.png\)", page):
            picture = pathlib.Path(folder, "runs", "gallery", f"{RENAMED.get(name, name)}.png")
            shrink(picture, HERE / "images" / picture.with_stem(name).name)


def shrink(source: pathlib.Path, target: pathlib.Path) -> None:
    from PIL import Image

    target.parent.mkdir(exist_ok=True)
    with Image.open(source) as picture:
        width = min(WIDTH, picture.width // 2)
        height = round(picture.height * width / picture.width)
        small = picture.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
        small.quantize(128).save(target, optimize=True)


if __name__ == "__main__":
    main()
