"""Texts, conversations and benchmarks to prepare, train on and evaluate."""

import hashlib
import json
import random
import runpy
from functools import partial
from importlib import metadata

import numpy as np
import pytest
import torch

import prepare
from plaingpt.data.chat_tokenizer import ChatTokenizer
from plaingpt.data.tokenizer_choice import train_bpe
from plaingpt.data.tokenizers import ByteTokenizer, ListTokenizer, from_json
from plaingpt.inference import lm_eval_model

CHAT = ChatTokenizer(ByteTokenizer())


def openai_gpt2():
    """What tiktoken's own module, behind the stand-in, makes of OpenAI's files for GPT-2."""
    module = metadata.distribution('tiktoken').locate_file('tiktoken_ext/openai_public.py')
    return runpy.run_path(str(module))['gpt2']()


def make_tokenizer(name, texts):
    """The tokenizer that prepare.py makes of these texts: of characters, bpe:N, or of no text."""
    if name == 'char':
        return ListTokenizer(sorted({*''.join(texts)}))
    if name.startswith('bpe:'):
        return train_bpe(texts, int(name[4:]))
    return from_json({'kind': name})


def ask(question, answer, *more):
    texts = [question, answer, *more]
    return [{'role': ('user', 'assistant')[i % 2], 'content': text}
            for i, text in enumerate(texts)]


def conversations(n, seed=0):
    """Answers are of very different lengths, so that micro-batches have few targets or many."""
    rng = random.Random(seed)
    return [ask(f'{i}?' * rng.randint(1, 4), 'ab' * rng.choice((1, 1, 12))) for i in range(n)]


def write_tasks(folder, monkeypatch, more_settings=''):
    """→ files of tasks of lm_eval, which knows no other: the right ending, the word, and one with
    these settings."""
    tasks = pytest.importorskip('lm_eval.tasks')  # an index of its own tasks would take seconds
    monkeypatch.setattr(tasks, 'TaskManager', partial(tasks.TaskManager, include_defaults=False))
    rows = [{'text': f'usage of {word}', 'word': word, 'words': [word, 'of the usage', 'def']}
            for word in ('the', 'main', 'parser', 'import', 'a class', 'self')]
    (folder / 'questions.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    for name, more in (
            ('ending', 'output_type: multiple_choice\ndoc_to_choice: words\ndoc_to_target: 0\n'
                       'metric_list: [{metric: acc}, {metric: acc_norm}]\n'),
            ('word', 'output_type: loglikelihood\ndoc_to_target: " {{word}}"\n'
                     'metric_list: [{metric: perplexity}, {metric: acc}]\n'),
            ('other', more_settings)):
        (folder / f'{name}.yaml').write_text(
            f'task: {name}\ndataset_path: json\ntest_split: test\ndoc_to_text: text\n'
            f'dataset_kwargs: {{data_files: {{test: {folder}/questions.jsonl}}}}\n{more}')
    return [folder / f'{name}.yaml' for name in ('ending', 'word', 'other')]


def one_benchmark(patch, answers):
    """eval_tasks=own measures the loss of these texts after 'def', without lm_eval."""
    def score_tasks(tasks, limit, model, tokenizer, batch_size, context, *sharing):
        @torch.no_grad()
        def losses(texts):
            rows = [torch.as_tensor(tokenizer.encode(f'def{text}').astype('i8')) for text in texts]
            with context:
                return [model(ids[None, :-1], ids[None, 1:])[1].item() for ids in rows]

        found = lm_eval_model.share(losses, answers, batch_size, *sharing)
        return {'own': {'loss': sum(found), 'questions': len(answers)}}
    patch.setattr(lm_eval_model, 'load_tasks', lambda names: None)
    patch.setattr(lm_eval_model, 'score_tasks', score_tasks)


def write_chat(folder, train, val=None):
    """Conversations → a dataset folder as prepare.py writes it."""
    folder.mkdir(parents=True)
    meta = {'format_version': 1, 'dtype': 'uint16', 'vocab_size': CHAT.vocab_size,
            'tokenizer': CHAT.to_json(), 'splits': {}, 'source': {}}
    for split, conversations in (('train', train), ('val', val or train)):
        ids, learned = (np.concatenate(part) for part in zip(
            *map(CHAT.encode_conversation, conversations), strict=True))
        digests = {}
        for name, data in ((split, ids.astype('<u2')), (f'{split}_mask', learned.astype('u1'))):
            (folder / f'{name}.bin').write_bytes(data.tobytes())
            digests[name] = hashlib.sha256(data.tobytes()).hexdigest()
        meta['splits'][split] = {
            'tokens': len(ids), 'documents': len(conversations), 'learned': int(learned.sum()),
            'files': [{'name': f'{split}.bin', 'tokens': len(ids), 'sha256': digests[split],
                       'mask_sha256': digests[f'{split}_mask']}]}
    (folder / 'meta.json').write_text(json.dumps(meta))
    return folder


def prepare_corpora(folder, texts):
    """{name: text} → the folder, with NAME.txt and, prepared by bytes, data/NAME of each."""
    for name, text in texts.items():
        (folder / f'{name}.txt').write_text(text)
        prepare.main(['text', f'--input={folder}/{name}.txt', '--tokenizer=byte',
                      f'--data_dir={folder}/data/{name}'])
    return folder


def prepare_documents(folder, texts):
    """Prepare a dataset by bytes in which each text is a document → the folder."""
    rows = folder.with_suffix('.jsonl')
    rows.parent.mkdir(parents=True, exist_ok=True)
    rows.write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts if text))
    prepare.main(['text', f'--input={rows}', '--tokenizer=byte', f'--data_dir={folder}'])
    return folder
