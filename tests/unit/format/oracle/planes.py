"""Codes and scales as the library lays them out in memory, from the description in format.hpp."""
import numpy as np

import formats


def line(size):
    return -(-size // 16) * 16


def payload(name, codes):
    """bytes [rows, payload bytes]"""
    if name != "nvfp4":
        return codes
    rows, hidden = codes.shape
    padded = np.zeros((rows, hidden + hidden % 2), np.uint8)
    padded[:, :hidden] = codes
    return padded[:, 0::2] | (padded[:, 1::2] << 4)


def scale_plane(layout, scales, row_scales):
    rows, blocks = scales.shape
    if layout == "packed_ue8m0":
        codes = scales if scales.dtype == np.uint8 else formats.e8m0_up(scales)
        words = np.zeros((line(rows * 4) // 4, -(-blocks // 4), 4), np.uint8)
        flat = np.zeros((rows, words.shape[1] * 4), np.uint8)
        flat[:, :blocks] = codes
        words[:rows] = flat.reshape(rows, -1, 4)
        return words.transpose(1, 0, 2).tobytes()
    raw = scales[..., None].view(np.uint8)  # [rows, blocks, bytes]
    if layout == "column_major":
        columns = np.zeros((blocks, line(rows * raw.shape[2])), np.uint8)
        columns[:, :rows * raw.shape[2]] = raw.transpose(1, 0, 2).reshape(blocks, -1)
        plane = columns.tobytes()
        if row_scales is not None:
            plane += row_scales.tobytes() + bytes(line(rows * 4) - rows * 4)
        return plane
    own = raw.reshape(rows, -1)
    if row_scales is not None:
        filled = np.zeros((rows, -(-blocks // 4) * 4), np.uint8)
        filled[:, :blocks] = own
        own = np.concatenate([filled, row_scales[:, None].view(np.uint8)], axis=1)
    plane = np.zeros((rows, line(own.shape[1])), np.uint8)
    plane[:, :own.shape[1]] = own
    return plane.tobytes()
