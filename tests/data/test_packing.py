"""Conversations packed into sequences: the contract is that of every loader, and of the mask."""

import json

import numpy as np
import pytest
import torch
from sample_data import CHAT, ask, write_chat

from plaingpt.data.dataset import open_dataset
from plaingpt.data.inspection import find_damage
from plaingpt.data.packing import conversation_starts, cut
from plaingpt.system.errors import UserError

CONVERSATION, USER, ASSISTANT, END = CHAT.conversation, *[CHAT.roles[r] for r in (
    'user', 'assistant')], CHAT.end_of_turn


def random_conversations(n, longest, seed=0):
    rng = np.random.default_rng(seed)
    return [ask(*(f'{i}:' + 'x' * int(rng.integers(0, longest)) for _ in range(2 * turns)))
            for i, turns in enumerate(rng.integers(1, 4, n))]


def loader_of(folder, block_size=64, batch_size=2, split='train', **settings):
    return open_dataset(folder).loader(split, block_size, batch_size, **settings)


def rows_of(loader):
    """(idx, targets) of all sequences of the loader's first epoch."""
    starts = loader.sequence_starts(np.arange(loader.sequences_per_epoch))
    return [part.tolist() for part in loader._on_host(starts)]


def test_a_sequence_holds_whole_conversations_then_padding_that_is_no_target(tmp_path):
    folder = write_chat(tmp_path / 'chat', [ask('ab', 'c'), ask('d', 'ef')])
    [idx], [targets] = rows_of(loader_of(folder, block_size=20))
    a, b, c, d, e, f = b'abcdef'
    assert idx == [CONVERSATION, USER, a, b, END, ASSISTANT, c, END,
                   CONVERSATION, USER, d, END, ASSISTANT, e, f, END,
                   CONVERSATION, END, END, END]
    assert targets == [-1, -1, -1, -1, -1, c, END, -1,
                       -1, -1, -1, -1, e, f, END, -1, -1, -1, -1, -1]


def test_conversations_that_fit_are_never_cut_and_each_answer_is_a_target_once(tmp_path):
    conversations = random_conversations(80, 8)
    loader = loader_of(write_chat(tmp_path / 'chat', conversations))
    idx, targets = rows_of(loader)
    text = [i for row in idx for i in [*row, CONVERSATION]]
    for messages in conversations:
        ids = CHAT.encode_conversation(messages)[0].tolist()
        places = [k for k in range(len(text)) if text[k:k + len(ids) - 1] == ids[:-1]]
        assert len(places) == 1  # its last token may be a target only
    in_loss = sum(CHAT.encode_conversation(messages)[1].sum() for messages in conversations)
    assert sum(t != -1 for row in targets for t in row) == in_loss == loader.num_targets.sum()
    used = sorted(sum(n for _, _, n in loader.layout(first)) for first in loader.firsts)
    assert used[0] + used[1] > 65  # no two sequences could have been one


def test_a_longer_one_is_cut_before_a_user_speaks_and_a_longer_turn_where_it_must(tmp_path):
    folder = write_chat(tmp_path / 'chat', [ask('a' * 5, 'b' * 5, 'c' * 5, 'd' * 5, 'e' * 40, 'f')])
    loader = loader_of(folder, block_size=19, batch_size=1)
    idx, targets = rows_of(loader)
    firsts = {tuple(row[:7]) for row in idx}
    a, c, e, f = b'acef'
    assert (CONVERSATION, USER, a, a, a, a, a) in firsts
    assert (CONVERSATION, USER, c, c, c, c, c) in firsts
    assert (CONVERSATION, e, e, e, END, ASSISTANT, f) in firsts  # within a message
    assert all(set(row) != {-1} for row in targets)
    padding = 1 - (loader.sizes + loader.with_bos).sum() / (loader.sequences_per_epoch * 20)
    assert 0 < padding < 1 and f'sequences, {padding:.1%} padding' in loader.describe()
    assert loader.tokens_left_out == 38 and loader.describe().endswith(
        'cut at 2 places, as longer than block_size; 38 tokens left out, with no answer near them')
    assert sorted(t for row in targets for t in row if t != -1) == sorted(
        [*b'bbbbb', END, *b'ddddd', END, f, END])


def test_each_epoch_has_each_sequence_once_and_processes_share_the_same_steps(tmp_path):
    folder = write_chat(tmp_path / 'chat', random_conversations(90, 12))
    whole = loader_of(folder, batch_size=6, seed=3)
    n = whole.sequences_per_epoch
    for epoch in range(2):
        starts = whole.sequence_starts(epoch * n + np.arange(n))
        assert sorted(starts) == whole.firsts.tolist()
    for size in (1, 2, 3):
        shares = [loader_of(folder, batch_size=1, micro_steps=6 // size, rank=rank,
                            world_size=size, seed=3) for rank in range(size)]
        for step in (0, 5, 40):
            idx, targets, weight = whole.train_batch(step, 0)
            parts = [shares[rank].train_batch(step, micro)
                     for micro in range(6 // size) for rank in range(size)]
            assert weight == 1
            assert torch.equal(torch.cat([part[0] for part in parts]), idx)
            assert torch.equal(torch.cat([part[1] for part in parts]), targets)
            for _, mine, weight in parts:  # what its mean has to be multiplied with
                assert weight == pytest.approx(
                    size * (mine != -1).sum().item() / (targets != -1).sum().item())


def test_a_mask_that_is_gone_or_another_one_is_noticed(tmp_path):
    folder = write_chat(tmp_path / 'chat', random_conversations(5, 5))
    mask = folder / 'train_mask.bin'
    before, ones = open_dataset(folder).identity('train'), mask.read_bytes()
    mask.write_bytes(bytes(len(ones)))
    with pytest.raises(UserError, match=r'train_mask.bin: another checksum'):
        loader_of(folder)
    assert 'train_mask.bin: another checksum' in find_damage(open_dataset(folder))[0]
    mask.unlink()
    with pytest.raises(UserError, match=r'train_mask.bin: No such file'):
        loader_of(folder)
    mask.write_bytes(ones)
    meta = json.loads((folder / 'meta.json').read_text())
    meta['splits']['train']['files'][0]['mask_sha256'] = 64 * '0'
    (folder / 'meta.json').write_text(json.dumps(meta))
    assert open_dataset(folder).identity('train') != before


def test_conversations_that_leave_no_target_are_refused(tmp_path):
    with pytest.raises(UserError, match='block_size=1 no sequence has a token of an answer'):
        loader_of(write_chat(tmp_path / 'none', [ask('a', 'b')]), block_size=1)


def test_a_conversation_is_not_cut_before_its_first_turn(tmp_path):
    told = [{'role': 'system', 'content': 's' * 9}, *ask('q' * 30, 'a')]
    stream = open_dataset(write_chat(tmp_path / 'told', [told])).split('train')
    _, sizes, _ = cut(stream, conversation_starts(stream), 32)
    assert sizes.tolist() == [32, len(stream) - 32]
