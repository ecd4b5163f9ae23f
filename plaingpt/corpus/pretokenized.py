"""Corpora that others tokenized: .bin shards with llm.c's header, downloaded or linked to."""

import os
import shutil
from pathlib import Path

import numpy as np

from plaingpt.corpus.dataset import FORMAT_VERSION, open_tokens
from plaingpt.corpus.shards import read_journal
from plaingpt.corpus.sources import explain_hub_errors
from plaingpt.corpus.tokenizers import GPT2Tokenizer
from plaingpt.system.errors import UserError
from plaingpt.system.files import sha256_of, write_json


def fetch_shards(corpus, folder, command):
    """Put the shards of `corpus` and a meta.json into `folder`. Raises UserError.

    command['input']: a folder whose shards are linked to; where empty, they are downloaded, except
    those that the same command has downloaded before.
    """
    if command['input']:
        names = [path.name for path in Path(command['input']).glob('*.bin')]
        chosen = choose_shards(names, command['max_shards'], command['input'])
        read_journal(folder, command)
        for name in [name for names in chosen.values() for name in names]:
            (folder / name).unlink(missing_ok=True)
            os.symlink((Path(command['input']) / name).resolve(), folder / name)
    else:
        remote = HubRepository(corpus.hub)
        chosen = choose_shards(remote.files, command['max_shards'], corpus.hub)
        wanted = [name for names in chosen.values() for name in names]
        remote.check_disk(folder, wanted)
        read_journal(folder, command)
        write_json(folder / 'journal.json', {'command': command})
        for name in wanted:
            remote.download(name, folder)
    splits = {}
    for split, names in chosen.items():
        files = [{'name': name, 'sha256': sha256_of(folder / name),
                  'tokens': open_tokens(folder / name, np.dtype('<u2')).tokens} for name in names]
        splits[split] = {'tokens': sum(file['tokens'] for file in files), 'files': files}
    write_json(folder / 'meta.json',
               {'format_version': FORMAT_VERSION, 'dtype': 'uint16',
                'vocab_size': GPT2Tokenizer.vocab_size, 'tokenizer': {'kind': 'gpt2'},
                'splits': splits, 'source': command})


def choose_shards(names, max_shards, where):
    """{split: names}, the first `max_shards` of train (0: all). Raises UserError."""
    chosen = {split: sorted(name for name in names
                            if name.endswith('.bin') and f'_{split}_' in f'_{name}')
              for split in ('train', 'val')}
    for split, found in chosen.items():
        if not found:
            raise UserError(f'{where}: no *_{split}_*.bin there')
    chosen['train'] = chosen['train'][:max_shards or None]
    return chosen


RESUMES = 'check the connection; the same command resumes from here'


class HubRepository:
    """A dataset repository on the hub, through huggingface_hub."""

    def __init__(self, repo):
        try:
            import huggingface_hub
        except ImportError:
            raise UserError(f'{repo} needs huggingface_hub: pip install huggingface_hub') from None
        self.repo, self._hub = repo, huggingface_hub
        with explain_hub_errors(repo, RESUMES):
            info = huggingface_hub.HfApi().dataset_info(repo, files_metadata=True)
        self.files = {file.rfilename: file for file in info.siblings}
        self.revision = info.sha  # so that all shards are of one version

    def check_disk(self, folder, names):
        sizes = {name: self.files[name].size or 0 for name in names}
        need = sum(size for name, size in sizes.items() if not (folder / name).exists())
        free = shutil.disk_usage(folder).free
        print(f'{len(names)} files, {sum(sizes.values()) / 1e9:.1f} GB')
        if need > free:
            raise UserError(f'{folder}: {need / 1e9:,.1f} GB needed, {free / 1e9:,.1f} GB free: '
                            'make room, take fewer with --max_shards=…, or choose another disk '
                            'with --data_dir')

    def download(self, name, folder):
        """Fetch a file, from where an earlier download stopped, and check it."""
        with explain_hub_errors(self.repo, RESUMES):
            self._hub.hf_hub_download(self.repo, name, repo_type='dataset', local_dir=folder,
                                      revision=self.revision)
        lfs = self.files[name].lfs
        if lfs and sha256_of(folder / name) != lfs.sha256:
            (folder / name).unlink()
            raise UserError(f'{self.repo}/{name}: what arrived has another checksum: run the same '
                            'command again')
