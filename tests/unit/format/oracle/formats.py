"""The wire formats in NumPy and ml_dtypes, written from their definitions; shares nothing with the
library. x is fp32 [rows, hidden]; quantise() gives codes [rows, hidden], block scales [rows, blocks]
and, for nvfp4, row scales [rows]. Codes and E8M0/e4m3 scales are uint8, other scales fp32."""
from dataclasses import dataclass

import ml_dtypes
import numpy as np

F32 = np.float32
LARGEST = np.finfo(F32).max
SMALLEST = np.finfo(F32).smallest_subnormal

ELEMENTS = {  # name: dtype, largest value, the code of NaN
    "e4m3": (ml_dtypes.float8_e4m3fn, F32(448), 0x7F),
    "e5m2": (ml_dtypes.float8_e5m2, F32(57344), 0x7F),
    "e2m1": (ml_dtypes.float4_e2m1fn, F32(6), None),
}


@dataclass(frozen=True)
class Wire:
    element: str
    block: int  # 0: the whole row
    rule: str


WIRES = {
    "e4m3_block128": Wire("e4m3", 128, "exact"),
    "e4m3_block128_pow2": Wire("e4m3", 128, "pow2"),
    "e4m3_block128_deepep": Wire("e4m3", 128, "deepep"),
    "e4m3_block128_deepep_pow2": Wire("e4m3", 128, "deepep_pow2"),
    "e5m2_block128": Wire("e5m2", 128, "exact"),
    "e5m2_block128_pow2": Wire("e5m2", 128, "pow2"),
    "mxfp8_e4m3": Wire("e4m3", 32, "mx"),
    "mxfp8_e5m2": Wire("e5m2", 32, "mx"),
    "nvfp4": Wire("e2m1", 16, "nvfp4"),
    "int8_token": Wire("int8", 0, "int8"),
}


def encode(element, x):
    """ml_dtypes after clamping; it does not clamp by itself (448 < x rounds to NaN in e4m3)."""
    dtype, largest, nan = ELEMENTS[element]
    codes = np.clip(x, -largest, largest).astype(dtype).view(np.uint8)
    if nan is not None:
        codes = np.where(np.isnan(x), np.uint8(nan), codes)
    return codes


def decode(element, codes):
    if element == "int8":
        return codes.view(np.int8).astype(F32)
    return codes.view(ELEMENTS[element][0]).astype(F32)


def e8m0(codes):
    """ml_dtypes flushes byte 0, which is 2^-127, in its conversion to fp32: go through fp64."""
    values = np.ldexp(1.0, codes.astype(np.int32) - 127).astype(F32)
    return np.where(codes == 255, F32(np.nan), values)


def e8m0_up(value):
    mantissa, exponent = np.frexp(np.where(np.isfinite(value), value, 1).astype(np.float64))
    up = exponent - (mantissa == 0.5)
    up = np.where(value == 0, -127, np.clip(up, -127, 127))
    up = np.where(np.isinf(value), 127, up) + 127
    return np.where(np.isnan(value), 255, up).astype(np.uint8)


def smallest_power_of_two(amax, largest):
    """As E8M0: the smallest k with largest * 2^k >= amax, exactly, in fp64."""
    _, exponent = np.frexp(amax.astype(np.float64))
    k = np.full(amax.shape, 200)
    for below in (-20, -19, -18, -17, -16, -15, -14, -10, -9, -8, -7, -6):
        candidate = exponent + below
        fits = np.ldexp(np.float64(largest), candidate) >= amax
        k = np.where(fits & (candidate < k), candidate, k)
    return np.where(amax == 0, 127, np.clip(k, -127, 127) + 127).astype(np.uint8)


def scale_of(amax, largest):
    scale = (amax / F32(largest)).astype(F32)
    return np.where(amax == 0, F32(1), np.where(scale == 0, SMALLEST, scale))


def blocks_of(x, block):
    """[rows, blocks, block], short last blocks filled with zeros, which change no maximum."""
    rows, hidden = x.shape
    block = block or hidden
    count = -(-hidden // block)
    padded = np.zeros((rows, count * block), F32)
    padded[:, :hidden] = x
    return padded.reshape(rows, count, block)


def finite_amax(x, axis):
    magnitude = np.where(np.isnan(x), F32(0), np.minimum(np.abs(x), LARGEST))
    return magnitude.max(axis=axis)


def quantise(name, x):
    wire = WIRES[name]
    rows, hidden = x.shape
    x = blocks_of(x, wire.block)
    with np.errstate(all="ignore"):
        codes, scales, row_scales = RULES[wire.rule](wire, x)
    return codes.reshape(rows, -1)[:, :hidden], scales, row_scales


def by_exact(wire, x):
    scales = scale_of(finite_amax(x, 2), ELEMENTS[wire.element][1])
    return encode(wire.element, x / scales[..., None]), scales, None


def by_pow2(wire, x):
    scales = e8m0(smallest_power_of_two(finite_amax(x, 2), ELEMENTS[wire.element][1]))
    return encode(wire.element, x / scales[..., None]), scales, None


def by_deepep(wire, x):
    amax = np.maximum(finite_amax(x, 2), F32(1e-4))
    return encode(wire.element, x * (F32(448) / amax)[..., None]), amax * (F32(1) / F32(448)), None


def by_deepep_pow2(wire, x):
    amax = np.maximum(finite_amax(x, 2), F32(1e-4))
    scales = e8m0(e8m0_up(amax * (F32(1) / F32(448))))
    return encode(wire.element, x * (F32(1) / scales)[..., None]), scales, None


def by_mx(wire, x):
    amax = np.abs(x).max(axis=2)  # a NaN wins
    scales = e8m0_up(amax * (F32(1) / ELEMENTS[wire.element][1]))
    return encode(wire.element, (x / e8m0(scales)[..., None])), scales, None


def by_nvfp4(_, x):
    row_scales = scale_of(finite_amax(x, (1, 2)), 2688)
    amax = np.abs(x).max(axis=2)
    scales = encode("e4m3", amax / (F32(6) * row_scales)[:, None])
    both = (decode("e4m3", scales) * row_scales[:, None])[..., None]
    codes = encode("e2m1", np.where(both == 0, np.copysign(F32(0), x), x / both))
    return np.where(np.isnan(both), 0, codes).astype(np.uint8), scales, row_scales


def by_int8(_, x):
    nan = np.isnan(x).any(axis=2)
    scales = np.where(nan, F32(np.nan), scale_of(finite_amax(x, 2), 127)).astype(F32)
    codes = np.rint(np.clip(x / scales[..., None], -127, 127))
    return np.where(nan[..., None], 0, codes).astype(np.int8).view(np.uint8), scales, None


RULES = {"exact": by_exact, "pow2": by_pow2, "deepep": by_deepep, "deepep_pow2": by_deepep_pow2,
         "mx": by_mx, "nvfp4": by_nvfp4, "int8": by_int8}


def dequantise(name, codes, scales, row_scales):
    """fp32 [rows, hidden]: the product, rounded once."""
    wire = WIRES[name]
    rows, hidden = codes.shape
    with np.errstate(all="ignore"):
        if wire.rule == "mx":
            scales = e8m0(scales)
        elif wire.rule == "nvfp4":
            scales = decode("e4m3", scales) * row_scales[:, None]
        spread = np.repeat(scales, wire.block or hidden, axis=1)[:, :hidden]
        return decode(wire.element, codes.copy()) * spread
