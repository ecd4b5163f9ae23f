"""Turn text into token files: data/<name>/train.bin, val.bin and meta.json.

    python prepare.py                                list the corpora
    python prepare.py shakespeare_char               prepare one of them
    python prepare.py text --input=notes/            your own .txt, .md and .py files
"""

import difflib
import hashlib
import json
import os
import sysconfig
import urllib.request
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

import tokenizer as tokenizers
from configurator import load_config
from dataloader import FORMAT_VERSION, sha256_of
from runtime import UserError, run_script


@dataclass
class PrepareConfig:
    # where from and where to
    input: str = ''  # a file, or a folder of them, to read instead of downloading
    data_dir: str = ''  # folder to write (default: data/NAME)
    # how
    tokenizer: str = 'auto'  # char, byte, gpt2, bpe or bpe:VOCAB_SIZE (auto: as listed)
    val_fraction: Literal['auto'] | float = 'auto'  # share held out (auto: 0.1 small, 0.0005 large)
    if_small: bool = False  # only if it takes under a minute; else say which command to run

    def problems(self):
        found = []
        if self.val_fraction != 'auto' and not 0 < self.val_fraction < 1:
            found.append(f'val_fraction={self.val_fraction}: expected a number between 0 and 1')
        if self.tokenizer != 'auto' and not tokenizers.is_name(self.tokenizer):
            found.append(f'tokenizer={self.tokenizer}: expected auto, {tokenizers.NAMES}')
        return found


# -----------------------------------------------------------------------------
# corpora: each yields documents, as text


@dataclass(frozen=True)
class Corpus:
    about: str  # a line for the list
    documents: Callable[[str], Iterable[str]]  # from --input ('' where it was not given)
    tokenizer: str
    small: bool  # fits in memory and takes under a minute


def standard_library(path):
    """The source of Python's own standard library: text on every machine."""
    root = Path(path or sysconfig.get_paths()['stdlib'])
    # no tests, nothing that was installed later, and no tables that are programs only in name
    skip = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__',
            'pydoc_data', 'encodings'}
    paths = [p for p in root.rglob('*.py') if not skip & set(p.relative_to(root).parts)
             and not p.name.startswith('_sysconfigdata')]
    return read_texts(sorted(paths), root)


def own_files(path):
    """The .txt, .md and .py files of a folder, or one file of any name."""
    if not path:
        raise UserError('text needs --input=FILE_OR_FOLDER')
    root = Path(path)
    if root.is_dir():
        paths = sorted(p for p in root.rglob('*') if p.suffix in ('.txt', '.md', '.py'))
        if not paths:
            raise UserError(f'{root}: no .txt, .md or .py file in it')
        return read_texts(paths, root)
    return read_texts([root], root)


def read_texts(paths, root):
    """Read UTF-8 files, leaving out empty ones. Raises UserError, also where all are empty."""
    texts = []
    for path in paths:
        try:
            text = path.read_bytes().decode('utf-8')
        except OSError as e:
            raise UserError(f'{path}: {e.strerror}') from None
        except UnicodeDecodeError as e:
            raise UserError(f'{path}: not UTF-8 at byte {e.start}: convert it, for example with '
                            'iconv -t utf-8') from None
        if text.strip():
            texts.append(text)
    if not texts:
        raise UserError(f'{root}: empty, no text to learn from')
    return texts


TINY_SHAKESPEARE = ('https://raw.githubusercontent.com/karpathy/char-rnn/master/data/'
                    'tinyshakespeare/input.txt')
TINY_SHAKESPEARE_SHA256 = '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'


def tiny_shakespeare(path):
    """1.1 MB of Shakespeare's plays, downloaded unless `path` names a copy."""
    if path:
        return own_files(path)
    try:
        with urllib.request.urlopen(TINY_SHAKESPEARE, timeout=30) as response:
            data = response.read()
    except OSError as e:  # URLError, timeouts and resets are all OSErrors
        raise UserError(f'{TINY_SHAKESPEARE} could not be downloaded '
                        f'({getattr(e, "reason", e)}): try again, or name a local copy with '
                        '--input=FILE') from None
    if hashlib.sha256(data).hexdigest() != TINY_SHAKESPEARE_SHA256:
        raise UserError(f'{TINY_SHAKESPEARE}: what arrived has another checksum: try again, or '
                        'name a local copy with --input=FILE')
    return [data.decode()]


def hub(path, subset=None):
    """Documents of a Hugging Face dataset, streamed: nothing is kept on disk or in memory."""

    def documents(local_copy):
        try:
            from datasets import load_dataset
            rows = load_dataset(local_copy or path, subset, split='train', streaming=True)
        except ImportError:
            raise UserError(f'{path} needs datasets: pip install datasets') from None
        except Exception as e:  # the library raises a wide family for "not had"
            raise UserError(f'{path} cannot be opened ({type(e).__name__}): connect to the '
                            'internet, or name a local copy with --input=FOLDER') from None
        return (row['text'] for row in rows)

    return documents


CORPORA = {
    'pystdlib': Corpus("the source of Python's standard library, found on this machine",
                       standard_library, 'bpe:2048', small=True),
    'shakespeare_char': Corpus('tiny Shakespeare, one token a character (nanoGPT)',
                               tiny_shakespeare, 'char', small=True),
    'shakespeare': Corpus('tiny Shakespeare, GPT-2 tokens (nanoGPT)',
                          tiny_shakespeare, 'gpt2', small=True),
    'text': Corpus('your own .txt, .md and .py files: --input=FILE_OR_FOLDER',
                   own_files, 'gpt2', small=True),
    'openwebtext': Corpus('8M web pages, 9.0B GPT-2 tokens, 18 GB as .bin',
                          hub('Skylion007/openwebtext'), 'gpt2', small=False),
    'fineweb-edu': Corpus('9.7M educational web pages, 10B GPT-2 tokens, 20 GB as .bin',
                          hub('HuggingFaceFW/fineweb-edu', 'sample-10BT'), 'gpt2', small=False),
}


def corpora_table():
    return '\n'.join(f'  {name:<18}{corpus.tokenizer:<10}{corpus.about}'
                     for name, corpus in CORPORA.items())


# -----------------------------------------------------------------------------
# documents → splits


def split_documents(documents, val_fraction, small):
    """Yield (split, text, joined): `joined` documents follow an end-of-text token.

    Many documents are split by a hash of their text, which does not change when others come or
    go. A small corpus of few is one running text, whose end is held out.
    """
    if small and len(documents) < 100:
        text = ''.join(documents)
        cut = int(len(text) * (1 - val_fraction))
        yield 'train', text[:cut], False
        yield 'val', text[cut:], False
        return
    for text in documents:
        digest = hashlib.blake2b(text.encode('utf-8', 'replace'), digest_size=8).digest()
        held_out = int.from_bytes(digest, 'big') < val_fraction * 2**64
        yield 'val' if held_out else 'train', text, True


# -----------------------------------------------------------------------------
# splits → files


class SplitWriter:
    """Writes a split's tokens under a temporary name, and counts."""

    def __init__(self, folder, split, dtype):
        self.path = folder / f'{split}.bin'
        self.temporary = folder / f'{split}.bin.tmp'
        self.file = open(self.temporary, 'wb')
        self.dtype = dtype
        self.tokens = self.documents = self.bytes = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, text, ids):
        self.file.write(ids.astype(self.dtype).tobytes())
        self.tokens += len(ids)
        self.documents += 1
        self.bytes += len(text.encode('utf-8', 'replace'))

    def entry(self):
        """What meta.json says of this split."""
        return {'tokens': self.tokens, 'documents': self.documents, 'bytes': self.bytes,
                'files': [{'name': self.path.name, 'tokens': self.tokens,
                           'sha256': sha256_of(self.temporary)}]}


def write_dataset(folder, texts, tokenizer, source, total=None):
    """Encode `texts`, as split_documents yields them, into `folder` → its meta.json as a dict.

    Nothing under a final name changes before all is written. Raises UserError.
    """
    dtype = np.dtype('<u2' if tokenizer.vocab_size <= 2**16 else '<u4')
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            writers = {split: stack.enter_context(SplitWriter(folder, split, dtype))
                       for split in ('train', 'val')}
            bar = stack.enter_context(tqdm(total=total, unit='B', unit_scale=True, disable=None,
                                           desc='encoding'))
            for split, text, joined in texts:
                ids = tokenizer.encode(text)
                if joined and tokenizer.end_of_text is not None:
                    ids = np.insert(ids.astype(dtype), 0, tokenizer.end_of_text)
                writers[split].write(text, ids)
                bar.update(len(text.encode('utf-8', 'replace')))
    except OSError as e:
        raise UserError(f'{folder}: cannot write there: {e.strerror}') from None
    for split, writer in writers.items():
        if writer.tokens == 0:
            raise UserError(f'{source["input"]}: the {split} split would be empty: use more text '
                            'or another --val_fraction')
    meta = {'format_version': FORMAT_VERSION, 'dtype': dtype.name,
            'vocab_size': tokenizer.vocab_size, 'tokenizer': tokenizer.to_json(),
            'splits': {split: writer.entry() for split, writer in writers.items()},
            'source': source}
    # From here to the end the folder counts as unfinished, should the machine stop.
    (folder / 'meta.json').unlink(missing_ok=True)
    for writer in writers.values():
        os.replace(writer.temporary, writer.path)
    temporary = folder / 'meta.json.tmp'
    temporary.write_text(json.dumps(meta, indent=1, ensure_ascii=False), encoding='utf-8')
    os.replace(temporary, folder / 'meta.json')
    return meta


# -----------------------------------------------------------------------------


def main(argv):
    if argv and argv[0] not in ('-h', '--help') and argv[0] not in CORPORA:
        nearest = difflib.get_close_matches(argv[0], CORPORA, n=1)
        raise UserError(f'unknown corpus {argv[0]!r}: '
                        + (f'did you mean {nearest[0]}? ' if nearest else '')
                        + 'python prepare.py lists all, and text --input=… reads your own')
    config = load_config(PrepareConfig, argv[1:] if argv and argv[0] in CORPORA else argv,
                         f'{__doc__}\nCorpora, with the tokenizer of each:\n{corpora_table()}')
    if not argv:
        print(f'{__doc__}\nCorpora, with the tokenizer of each:\n{corpora_table()}')
        return
    name = argv[0]
    corpus = CORPORA[name]
    folder = Path(config.data_dir or f'data/{name}')
    if config.if_small and (not corpus.small or name == 'text'):
        raise UserError(f'{folder} is not prepared: run python prepare.py {name}'
                        + (' --input=FILE_OR_FOLDER' if name == 'text' else ''))
    print(f'preparing {name}: {corpus.about}')
    documents = corpus.documents(config.input)
    kind = corpus.tokenizer if config.tokenizer == 'auto' else config.tokenizer
    if not corpus.small and kind not in ('gpt2', 'byte'):
        raise UserError(f'{name} is too large for --tokenizer={kind}: use gpt2 or byte')
    tokenizer = tokenizers.make_tokenizer(kind, documents)
    val_fraction = config.val_fraction
    if val_fraction == 'auto':
        val_fraction = 0.1 if corpus.small else 0.0005
    source = {'corpus': name, 'input': config.input or name, 'val_fraction': val_fraction}
    total = sum(len(text.encode()) for text in documents) if corpus.small else None
    meta = write_dataset(folder, split_documents(documents, val_fraction, corpus.small),
                         tokenizer, source, total)
    for split, about in meta['splits'].items():
        print(f'{folder}/{split}.bin: {about["tokens"]:,} tokens, '
              f'{about["bytes"] / about["tokens"]:.2f} bytes each, from {about["documents"]:,} '
              f'document{"s" if about["documents"] > 1 else ""}')
    print(f'{folder}/meta.json: {kind} tokenizer, {meta["vocab_size"]:,} tokens, {meta["dtype"]}')


if __name__ == '__main__':
    run_script(main)
