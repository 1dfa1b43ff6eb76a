"""Small data sets and tokenizers for tests."""

from collections import OrderedDict

import numpy

from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.data.indexed import IndexedWriter

EOD = 0


class PlainTokenizer:
    """Stands in where only sizes and ids matter."""

    pad = -1

    def __init__(self, vocab_size=1000, eod=EOD):
        self.vocab_size, self.eod = vocab_size, eod
        self.unique_identifiers = OrderedDict([("class", "PlainTokenizer"), ("size", str(vocab_size))])

    def files(self):
        """There are none."""
        return {}


def write_documents(prefix, documents, vocab_size=1000):
    """Write documents (lists of ids, end token included) as PREFIX.bin and PREFIX.idx; the prefix as text."""
    writer = IndexedWriter(str(prefix), vocab_size)
    for document in documents:
        writer.add(numpy.array(document), numpy.array([len(document)]))
    writer.finish()
    writer.publish()
    return str(prefix)


def numbered_documents(count, length, start=1, vocab_size=1000):
    """Documents of ``length`` tokens that count on, each ended by EOD."""
    ids = iter(range(start, start + count * length))
    return [[1 + next(ids) % (vocab_size - 1) for _ in range(length - 1)] + [EOD] for _ in range(count)]


def data_config(folder, paths, sequence_length=8, split="8,2,0", weights=None, **data):
    """A configuration whose data section reads ``paths``."""
    config = PretrainConfig()
    config.run.dir = str(folder)
    config.data.paths = [str(path) for path in paths]
    config.data.sequence_length = sequence_length
    config.data.split = split
    config.data.weights = weights
    for name, value in data.items():
        setattr(config.data, name, value)
    return config
