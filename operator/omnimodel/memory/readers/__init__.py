"""Readers of weight files: each trusts nothing and gives a mapping of names to tensors, loaded one by one.

`safetensors`, `checkpoint` (torch), `gguf`, `npz` and `ctranslate2` have a `read(path)` each. A damaged or hostile
file is an ImageError that names it, never a crash, a hang or a blow-up of memory: nothing is allocated for a number
that a file claims, only for bytes that it has. Used by what publishes a model, in a sandbox. They import torch.
"""
