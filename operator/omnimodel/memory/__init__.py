"""Images of weights, the frames they are woken into, the arena they wait in, and the ledger of every byte.

`devices` has one protocol with a backend each for host memory and CUDA. The agent owns frames and ledger; the
runtime maps frames into a model's process and writes images when a model is published.
"""
