"""Tokenizes a corpus into a cache folder, and prints the number and the sum of its tokens."""

import sys
from pathlib import Path

from sansgpu.config import DataConfig
from sansgpu.data.shards import build_store, build_tokenizer
from sansgpu.data.sources import open_sources

if __name__ == "__main__":
    data, cache = DataConfig(dataset_name=sys.argv[1], vocab_size=300), Path(sys.argv[2])
    source = open_sources(data).train
    tokenizer = build_tokenizer(data, source, cache, lambda *_: None)
    store = build_store(source, tokenizer, cache, lambda *_: None)
    print(len(store.tokens), int(store.tokens[:].astype("int64").sum()))
