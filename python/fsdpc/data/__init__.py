"""Text and tokens as training sequences: datasets, sampling over ranks, batches made ahead."""

from fsdpc.data.datasets import ByteDataset, PackedSequences, SequenceDataset, TokenDataset
from fsdpc.data.files import default_corpus
from fsdpc.data.loader import DistributedSampler, GlobalBatchSampler, Loader

__all__ = [
    "ByteDataset", "DistributedSampler", "GlobalBatchSampler", "Loader", "PackedSequences",
    "SequenceDataset", "TokenDataset", "default_corpus",
]  # fmt: skip
