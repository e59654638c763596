"""OmniModel: a catalogue of machine-learning models on shared accelerators."""
