"""``hf-deltamatch export``: what a training run left, as a folder ready to upload.

=========== =====================================================
source      the checkpoint that is meant, checked, and what its run knows
weights     safetensors and config as Transformers writes them
fp8         linears in Transformers' fine-grained FP8 format
evaluations lm-eval's results, and the hub's ``.eval_results``
facts       ``results.json``: every number that the card quotes
card        ``README.md`` from it
study       a run of ``hf-deltamatch study``: its line of ``runs.jsonl``
study_facts ``results.json`` of such a run, and the study of it alone
card_study  the parts of its card that differ
markdown    tables
folder      all of it, whole or not at all
=========== =====================================================
"""
