"""Makes src/hardy/data/mini_digits.npz and its contact sheet: five digit domains, always the same arrays.

    python tools/make_mini_digits.py

Needs numpy, scipy, pillow, scikit-learn and the DejaVu fonts (Debian: fonts-dejavu-core, fonts-dejavu-extra).
Other versions of these may move a few grey levels; the script then says that the hash differs.

| domain | made of                                                       | reminds of  |
|--------|---------------------------------------------------------------|-------------|
| pen    | handwriting, thin, white on black, wide margin                | MNIST       |
| mail   | other handwriting, tight crop, soft grey, blurred             | USPS        |
| street | fonts, low contrast, uneven light, neighbours cut in, blurred | SVHN        |
| print  | fonts, one to three digits in any colours, turned             | SynthDigits |
| blend  | pen's handwriting, absolute difference to patches and stripes | MNIST-M     |

The handwriting (UCI optical digits, 8x8) is cut once: training images of all domains come from the first rows,
test images from the last. No row names its writer; the rows seem to be ordered by writer, so the two parts
should share at most one. A colour image has a palette of its own, because that is what compresses.
"""

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from scipy import ndimage
from sklearn.datasets import load_digits

ROOT = Path(__file__).parents[1]
FILE = ROOT / "src/hardy/data/mini_digits.npz"
SHEET = ROOT / "docs/images/mini_digits.png"
SHA256 = "e1855e032ce8ef0ae0e5b42c61c2083b71ea773456cc6652f541af634ce9265d"  # of all arrays in the order of their names

SIDE, CLASSES, SEED = 28, 10, 20
PER_CLASS = {"train": 60, "test": 20}
POOLS = {"train": slice(0, 1350), "test": slice(1350, None)}
FACES = [
    f"DejaVu{family}{style}.ttf"
    for family, styles in {
        "Sans": ("", "-Bold", "-Oblique", "-BoldOblique", "-ExtraLight"),
        "SansCondensed": ("", "-Bold", "-Oblique", "-BoldOblique"),
        "SansMono": ("", "-Bold", "-Oblique", "-BoldOblique"),
        "Serif": ("", "-Bold", "-Italic", "-BoldItalic"),
        "SerifCondensed": ("", "-Bold", "-Italic", "-BoldItalic"),
    }.items()
    for style in styles
]
GLYPH, CANVAS = 48, 96  # pixels: font size and side of the picture a number is drawn in

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]  # pixels in [0, 1]


def handwriting(share: int, split: str, rng: Generator) -> tuple[Floats, Bytes]:
    """Balanced, shuffled 8x8 digits of one pool: the first (share 0) or the last (-1) of each class."""
    count = PER_CLASS[split]
    images, labels = (array[POOLS[split]] for array in load_digits(return_X_y=True))
    rows = np.concatenate([np.flatnonzero(labels == c)[share * count :][:count] for c in range(CLASSES)])
    rng.shuffle(rows)
    return images[rows].reshape(-1, 8, 8) / 16, labels[rows].astype(np.uint8)


def numerals(split: str, rng: Generator) -> tuple[Bytes, Bytes]:
    """Balanced, shuffled digits yet to be drawn."""
    digits = rng.permutation(np.repeat(np.arange(CLASSES, dtype=np.uint8), PER_CLASS[split]))
    return digits, digits


def typeset(digit: int, *, neighbours: float, gap: float, rng: Generator) -> Floats:
    """A digit in the middle of the canvas in a random face, with a random neighbour at a side or not."""
    font = ImageFont.truetype(FACES[rng.integers(len(FACES))], GLYPH)
    picture = Image.new("L", (CANVAS, CANVAS))
    texts = {0: str(digit)} | {p: str(rng.integers(CLASSES)) for p in (-1, 1) if rng.random() < neighbours}
    for place, text in texts.items():
        left, top, right, bottom = font.getbbox(text)
        across = CANVAS / 2 + place * gap * font.getlength("0") - (left + right) / 2
        ImageDraw.Draw(picture).text((across, CANVAS / 2 - (top + bottom) / 2), text, 255, font)
    return np.asarray(picture) / 255


def warp(ink: Floats, *, zoom: float, turn: float, lean: float, drift: float, rng: Generator) -> Floats:
    """The ink `zoom` times as large in a 28x28 context, with a random turn (degrees), lean and drift (pixels)."""
    angle = np.deg2rad(rng.normal(0, turn))
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = rotation @ np.array([[1.0, 0.0], [rng.normal(0, lean), 1.0]]) / zoom
    offset = (np.array(ink.shape) - 1) / 2 - matrix @ ((SIDE - 1) / 2 + rng.uniform(-drift, drift, 2))
    smooth = ndimage.gaussian_filter(ink, 0.4 / zoom) if zoom < 1 else ink  # no aliasing when shrinking
    warped: Floats = ndimage.affine_transform(smooth, matrix, offset, output_shape=(SIDE, SIDE), order=3)
    return warped.clip(0, 1)


def colours(rng: Generator, count: int, dull: float) -> Floats:
    """Random colours, moved towards grey by `dull`."""
    vivid = rng.random((count, 3))
    grey: Floats = vivid.mean(1, keepdims=True)
    return (1 - dull) * vivid + dull * grey


def two_colours(rng: Generator, *, dull: float, least: float, most: float) -> Floats:
    """Two random colours whose distance lies between `least` and `most`."""
    while not least <= np.linalg.norm(np.subtract(*(pair := colours(rng, 2, dull)))) <= most:
        pass
    return pair


def light(rng: Generator, strength: float) -> Floats:
    """Uneven light: a slope and soft clouds, the same in all three channels."""
    rows, columns = np.mgrid[-1 : 1 : SIDE * 1j, -1 : 1 : SIDE * 1j]
    down, across = rng.normal(0, strength, 2)
    clouds = ndimage.gaussian_filter(rng.normal(0, 1, (SIDE, SIDE)), 4)
    return np.asarray(down * rows + across * columns + 0.7 * strength * clouds / clouds.std())[..., None]


def texture(rng: Generator) -> Floats:
    """Patches around random points, each with its own colour and stripes of another."""
    grid: Floats = np.moveaxis(np.mgrid[:SIDE, :SIDE], 0, -1).astype(float)
    points = rng.uniform(0, SIDE, (rng.integers(3, 7), 2))
    nearest = np.linalg.norm(grid[:, :, None] - points, axis=-1).argmin(-1)
    plain, other = colours(rng, len(points), 0.3), colours(rng, len(points), 0.3)
    waves = np.sin(grid @ rng.normal(0, 0.5, (2, len(points))))
    stripes = np.take_along_axis(waves, nearest[..., None], -1) > rng.uniform(0, 1)
    patches: Floats = np.where(stripes, (plain + other)[nearest] / 2, plain[nearest])
    return patches + light(rng, 0.1)


def greys(image: Floats) -> Bytes:
    return (image * 15).astype(np.uint8) * np.uint8(17)


def palette(image: Floats, size: int) -> Bytes:
    picture = Image.fromarray((image.clip(0, 1) * 255).astype(np.uint8))
    reduced = picture.quantize(size, Image.Quantize.MEDIANCUT, kmeans=2, dither=Image.Dither.NONE)
    return np.asarray(reduced.convert("RGB"))


def pen(ink: Floats, rng: Generator) -> Bytes:
    stroke = warp(ink, zoom=2.5, turn=4, lean=0.08, drift=1, rng=rng)
    return greys(np.clip((stroke - 0.4) * 4, 0, 1))  # only the core of a stroke: thin, nearly binary


def mail(ink: Floats, rng: Generator) -> Bytes:
    soft = ndimage.gaussian_filter(warp(ink, zoom=rng.uniform(3.4, 3.7), turn=0, lean=0.05, drift=0, rng=rng), 0.8)
    return greys(((soft - soft.min()) / (soft.max() - soft.min())) ** 0.7)


def street(digit: int, rng: Generator) -> Bytes:
    ink = typeset(digit, neighbours=0.7, gap=rng.uniform(0.85, 1.05), rng=rng)
    ink = warp(ink, zoom=rng.uniform(0.5, 0.75), turn=5, lean=0.1, drift=2, rng=rng)
    soft = ndimage.gaussian_filter(ink, rng.uniform(0.6, 1.4))[..., None]
    wall, paint = two_colours(rng, dull=0.5, least=0.18, most=0.5)
    return palette(wall + (paint - wall) * soft + light(rng, 0.15), 20)


def print_(digit: int, rng: Generator) -> Bytes:
    ink = typeset(digit, neighbours=0.4, gap=rng.uniform(1.0, 1.2), rng=rng)
    ink = warp(ink, zoom=rng.uniform(0.4, 0.65), turn=12, lean=0, drift=2.5, rng=rng)
    paper, paint = two_colours(rng, dull=0, least=0.4, most=np.inf)
    return palette(paper + (paint - paper) * ink[..., None], 8)


def blend(ink: Floats, rng: Generator) -> Bytes:
    stroke = warp(ink, zoom=2.8, turn=6, lean=0.1, drift=1, rng=rng)
    return palette(np.abs(texture(rng) - np.clip((stroke - 0.4) * 5, 0, 1)[..., None]), 20)


DOMAINS: dict[str, tuple[Any, Any]] = {  # where its digits come from, what makes an image of one
    "pen": (partial(handwriting, 0), pen),
    "mail": (partial(handwriting, -1), mail),
    "street": (numerals, street),
    "print": (numerals, print_),
    "blend": (partial(handwriting, 0), blend),
}


def contact_sheet(arrays: dict[str, Bytes]) -> Image.Image:
    tile, margin, across = 2 * SIDE, 70, 20
    sheet = Image.new("RGB", (margin + across * tile, len(DOMAINS) * tile), "white")
    font = ImageFont.truetype("DejaVuSans.ttf", 18)
    for row, name in enumerate(DOMAINS):
        ImageDraw.Draw(sheet).text((6, row * tile + tile / 2), name, "black", font, anchor="lm")
        for column, image in enumerate(arrays[f"{name}_x_train"][:across]):
            sheet.paste(
                Image.fromarray(image).resize((tile, tile), Image.Resampling.NEAREST),
                (margin + column * tile, row * tile),
            )
    return sheet


def main() -> None:
    arrays: dict[str, Any] = {}
    for place, (name, (source, draw)) in enumerate(DOMAINS.items()):
        for part, split in enumerate(PER_CLASS):
            rng = np.random.default_rng([SEED, place, part])
            digits, arrays[f"{name}_y_{split}"] = source(split, rng)
            arrays[f"{name}_x_{split}"] = np.stack([draw(digit, rng) for digit in digits])
    np.savez_compressed(FILE, **arrays)
    contact_sheet(arrays).save(SHEET, optimize=True)
    found = hashlib.sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays))).hexdigest()
    print(f"{FILE.name}: {FILE.stat().st_size / 1e6:.2f} MB, sha256 of the arrays {found}")
    if found != SHA256:
        raise SystemExit(f"expected {SHA256}: made with other versions of the libraries or fonts")


if __name__ == "__main__":
    main()
