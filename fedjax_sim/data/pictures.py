"""A folder of pictures, one subfolder per class, as a dataset (needs pillow)."""

from __future__ import annotations

import pathlib
import re
import warnings
from typing import Any

import numpy as np

from fedjax_sim.data.memory import refuse_if_too_large
from fedjax_sim.data.npz import Arrays, reason
from fedjax_sim.data.spec import shown
from fedjax_sim.data.tables import held_out, train_and_test
from fedjax_sim.errors import UserError

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


LARGEST = 4096  # pixels of a side


def picture_size(text: str) -> tuple[int, int]:
    """Height and width.

    >>> picture_size("32"), picture_size("32x48")
    ((32, 32), (32, 48))
    """
    parts = text.split("x")
    sides = [int(part) for part in parts if re.fullmatch("[0-9]{1,4}", part)]
    fit = all(1 <= side <= LARGEST for side in sides)
    if len(sides) != len(parts) or len(parts) > 2 or not fit:
        raise UserError(
            f"size '{shown(text)}' cannot be read; write size=32, or size=32x48 (height x width), 1"
            f" to {LARGEST}"
        )
    return sides[0], sides[-1]


def read_pictures(folder: pathlib.Path, size: tuple[int, int] | None = None) -> Arrays:
    """x_*, y_*: classes are numbered by the alphabetical order of their folders, pictures read in
    that order.

    FOLDER/train/CLASS/* and FOLDER/test/CLASS/*, or FOLDER/CLASS/*, where a fixed fifth of each
    class is for testing. Grey pictures have one channel; if one has colour, all have three. All
    must have the same size, or get this `size`.
    """
    try:
        from PIL import Image, ImageFile
    except ImportError:
        raise UserError(
            "reading a folder of pictures needs pillow: pip install 'fedjax-sim[images]'"
        ) from None
    both = [folder / "train", folder / "test"]
    parts = both if all(part.is_dir() for part in both) else [folder]
    classes = sorted({place.name for part in parts for place in _folders(part)})
    files = [
        (file, number, part.name == "test")
        for part in parts
        for number, name in enumerate(classes)
        for file in sorted(_files(part / name))
    ]
    if not files:
        raise UserError(
            f"'{shown(folder)}' has no pictures: put them into one subfolder per class"
            f" ({', '.join(ENDINGS)})"
        )
    y, in_test = (np.array([file[i] for file in files]) for i in (1, 2))
    is_test = in_test if len(parts) == 2 else held_out(y)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        # other libraries set it for all
        lenient, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
        try:
            x = _stack(Image, [file for file, _, _ in files], size)
        finally:
            ImageFile.LOAD_TRUNCATED_IMAGES = lenient
    return train_and_test(is_test, {"x": x, "y": y})


def _folders(place: pathlib.Path) -> list[pathlib.Path]:
    return [one for one in place.iterdir() if one.is_dir() and not one.name.startswith(".")]


def _files(place: pathlib.Path) -> list[pathlib.Path]:
    inside = place.iterdir() if place.is_dir() else ()
    return [file for file in inside if file.suffix.lower() in ENDINGS]


def _stack(image: Any, files: list[pathlib.Path], resized: tuple[int, int] | None) -> np.ndarray:
    """[n, H, W, 1 or 3] uint8. Sizes and modes are compared before anything is decoded."""
    size, grey = resized and resized[::-1], True
    for file in files:
        try:
            with image.open(file) as picture:
                shape, mode = picture.size, picture.mode
        except Exception as error:  # decoders raise whatever they like
            raise UserError(
                f"'{shown(file)}' is not a readable picture ({reason(error)})"
            ) from None
        size = size or shape
        if shape != size and resized is None:
            raise UserError(
                f"'{shown(file)}' is {shape[0]}x{shape[1]}, but '{shown(files[0])}' is"
                f" {size[0]}x{size[1]}: all pictures must have one size; folder:PATH,size=32"
                " resizes them"
            )
        grey = grey and mode in ("1", "L")
    assert size is not None
    out_shape = (len(files), size[1], size[0], 1 if grey else 3)
    refuse_if_too_large(
        2 * int(np.prod(out_shape, dtype=object)),
        f"{len(files)} pictures",
        "use fewer or smaller ones",
    )
    out = np.empty(out_shape, np.uint8)
    for row, file in zip(out, files, strict=True):
        try:
            with image.open(file) as picture:
                picture = picture.convert("L" if grey else "RGB")
                if picture.size != size:
                    picture = picture.resize(size, image.Resampling.BILINEAR)
                row[...] = np.asarray(picture).reshape(row.shape)
        except Exception as error:
            raise UserError(
                f"'{shown(file)}' is not a readable picture ({reason(error)})"
            ) from None
    return out
