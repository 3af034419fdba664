"""``hf-deltamatch bench``: times of our kernels beside the best BF16 attention, in one run."""
