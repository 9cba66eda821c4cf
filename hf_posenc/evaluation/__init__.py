"""What a model is worth at each length, at each place of its window, and beside others: `hf_posenc.evaluate`."""
