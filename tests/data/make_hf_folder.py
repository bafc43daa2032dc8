"""Writes ``hf_folder`` with HF datasets (5.2.0 wrote what is here): run it in this folder."""

from datasets import ClassLabel, Dataset, Features, Value

features = Features(
    {"id": Value("int64"), "text": Value("string"), "label": ClassLabel(names=["no", "yes"])}
)
columns = {"id": [0, 1, 2, 3, 4], "text": ["a", "ö", None, "", "e"], "label": [0, 1, 0, 1, 0]}
Dataset.from_dict(columns, features=features).save_to_disk("hf_folder", num_shards=2)
