"""Data loading for training: datasets of text and tokens, sampling across ranks, prefetching."""

from fsdpc.data.arrays import ArrayDataset
from fsdpc.data.datasets import ByteDataset, PackedSequences, SequenceDataset
from fsdpc.data.description import TokenDescription, read_description
from fsdpc.data.files import default_corpus
from fsdpc.data.loader import DistributedSampler, GlobalBatchSampler, Loader
from fsdpc.data.tokens import TokenDataset, document_lengths, documents_in

__all__ = [
    "ArrayDataset", "ByteDataset", "DistributedSampler", "GlobalBatchSampler", "Loader",
    "PackedSequences", "SequenceDataset", "TokenDataset", "TokenDescription", "default_corpus",
    "document_lengths", "documents_in", "read_description",
]  # fmt: skip
