"""``hf-deltamatch export``: what a training run left, as a folder ready to upload.

=========== =====================================================
source      the checkpoint that is meant, checked, and what its run knows
weights     safetensors and config as Transformers writes them
fp8         linears in Transformers' fine-grained FP8 format
evaluations lm-eval's results, and the hub's ``.eval_results``
facts       ``results.json``: every number that the card quotes
card        ``README.md`` from it
folder      all of it, whole or not at all
=========== =====================================================
"""
