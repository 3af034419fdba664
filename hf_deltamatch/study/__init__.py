"""``hf-deltamatch study``: arms × settings × seeds from one YAML file, on one machine, with a report.

=========== =====================================================
spec        the file, checked, as a list of runs with their keys
corpus      bytes of text, and the hash of what they were
model       Transformers' own classes, in the arithmetic of an arm
tokenizer   bytes as tokens
evaluate    lm-eval's scores of final weights
before      what is looked at before the first run
run         one run on one device
save        the weights that it keeps
pool        many runs at once, each result kept as it comes
claims      whether gaps keep the bounds that the file sets
report      gaps paired over seeds, as Markdown, JSON and PNG
=========== =====================================================
"""
