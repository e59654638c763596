"""Sound in and out: WAV files, and another sampling rate."""

from __future__ import annotations

import io
import math
import wave
from typing import Any

import numpy as np

from omnimodel.runtime.requests import invalid
from omnimodel.runtime.sdk import Audio

MODEL_RATE = 16_000
_LONGEST_SECONDS = 3600


def read_wav(content: bytes, rate: int = MODEL_RATE, *, field: str = "file") -> Audio:
    """A WAV file (PCM of 8 to 32 bits, any rate and number of channels) as mono float32 at `rate`.

    Args:
        content: of the file.
        rate: of the samples that come out.
        field: of the request, for messages.

    Raises:
        RequestError: it is no such file, or has no samples.
    """
    try:
        with wave.open(io.BytesIO(content)) as file:
            channels, width, file_rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            frames = file.readframes(file.getnframes())
    except (wave.Error, EOFError, ValueError, OverflowError, RuntimeError) as error:
        raise invalid(field, f"it is no PCM WAV file ({str(error) or 'it ends too soon'})") from error
    if not (1 <= channels <= 32 and 1 <= width <= 4 and 1000 <= file_rate <= 384_000):
        raise invalid(field, "a WAV file with impossible properties")
    frames = frames[: len(frames) - len(frames) % (channels * width)]
    if not frames:
        raise invalid(field, "the recording is empty")
    if len(frames) // (channels * width) > _LONGEST_SECONDS * file_rate:
        raise invalid(field, f"longer than {_LONGEST_SECONDS} seconds")
    samples = _samples(frames, width).reshape(-1, channels).mean(axis=1, dtype=np.float32)
    return Audio(resample(samples, file_rate, rate), rate)


def _samples(frames: bytes, width: int) -> np.ndarray[Any, Any]:
    if width == 1:
        return (np.frombuffer(frames, np.uint8).astype(np.float32) - 128) / 128
    if width == 3:
        raw = np.frombuffer(frames, np.uint8).reshape(-1, 3)
        wide = np.zeros((len(raw), 4), np.uint8)
        wide[:, 1:] = raw
        return wide.reshape(-1).view("<i4").astype(np.float32) / 2**31
    samples: np.ndarray[Any, Any] = np.frombuffer(frames, f"<i{width}").astype(np.float32) / 2 ** (8 * width - 1)
    return samples


def resample(samples: np.ndarray[Any, Any], rate: int, wanted: int) -> np.ndarray[Any, Any]:
    """Samples at another rate, by a windowed sinc (32 zero crossings, Hann), which keeps what both rates can carry.

    Source: J. O. Smith, Digital Audio Resampling, https://ccrma.stanford.edu/~jos/resample/
    """
    if rate == wanted or not len(samples):
        return np.ascontiguousarray(samples, dtype=np.float32)
    cutoff = min(1.0, wanted / rate)
    reach = math.ceil(32 / cutoff)
    common = math.gcd(rate, wanted)
    step, phases = rate // common, wanted // common
    count = len(samples) * wanted // rate
    padded = np.concatenate([np.zeros(reach, np.float32), samples, np.zeros(reach + step, np.float32)])
    output = np.empty(count, np.float32)
    taps = np.arange(-reach + 1, reach + 1)
    for phase in range(min(phases, count)):
        start, offset = divmod(phase * step, phases)
        distance = taps - offset / phases
        kernel = cutoff * np.sinc(cutoff * distance) * (0.5 + 0.5 * np.cos(np.pi * np.clip(distance / reach, -1, 1)))
        indices = range(phase, count, phases)
        windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach)[start + 1 :: step][: len(indices)]
        output[phase::phases] = windows @ kernel.astype(np.float32)
    return output


def write_wav(audio: Audio) -> bytes:
    """A WAV file of 16 bits.

    Raises:
        TypeError: the samples are no one-dimensional floating-point array.
    """
    samples = np.asarray(audio.samples.detach().cpu() if hasattr(audio.samples, "detach") else audio.samples)
    if samples.ndim != 1 or samples.dtype.kind != "f":
        raise TypeError(f"Audio.samples is {samples.dtype}{list(samples.shape)}, not a one-dimensional float array")
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(audio.rate)
        file.writeframes((np.clip(np.nan_to_num(samples), -1, 1) * 32767).round().astype("<i2").tobytes())
    return content.getvalue()
