import json
from dataclasses import replace

import pytest
import torch

from plaingpt.benchmarks import grid
from plaingpt.benchmarks.grid import (
    COLUMNS,
    ROWS,
    draw,
    interaction_effects,
    numbers,
    run_all,
    seconds_to,
    settings,
    tables,
)
from plaingpt.system.errors import UserError
from plaingpt.training.settings import TrainConfig

SMALL = TrainConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=8, max_iters=20,
                    gradient_accumulation_steps=2, log_interval=5, lr_decay_iters=20,
                    warmup_iters=2)
CELLS = [(row, column) for row in ROWS for column in COLUMNS]


def test_the_24_cells_are_different_runs_that_can_run():
    cells = [settings(SMALL, *cell) for cell in CELLS]
    assert len(set(map(repr, cells))) == 24
    assert [cell.problems() for cell in cells] == [[]] * 24
    whole = settings(SMALL, 'default', 'none').step_tokens()
    assert settings(SMALL, 'default', 'accumulation').step_tokens() == whole
    assert settings(SMALL, 'default', 'reduced batch').step_tokens() == whole // 4
    assert settings(SMALL, 'context × 2', 'none').step_tokens() == whole * 2
    assert settings(replace(SMALL, total_batch_size=1024), 'context × 2', 'none').problems() == []


def test_departures_from_the_sum_and_the_product_of_both_changes():
    base = {('default', column): 10.0 * (k + 1) for k, column in enumerate(COLUMNS)}
    rows = dict(zip(ROWS, (0.0, 5.0, 10.0, 20.0), strict=True))
    added = {(row, column): base['default', column] + rows[row] for row, column in CELLS}
    multiplied = {(row, column): base['default', column] * (1 + rows[row] / 10)
                  for row, column in CELLS}
    assert len(interaction_effects(added)) == 15
    assert all(pair[0] == 0 and pair[1] < 0 for pair in interaction_effects(added).values())
    assert all(pair[1] == 0 and pair[0] > 0 for pair in interaction_effects(multiplied).values())
    # 10 alone, 15 with twice the context, 20 with SGD: together 25, or 30
    assert interaction_effects({**added, ('context × 2', 'SGD + cosine'): 27.0})[
        'context × 2', 'SGD + cosine'] == pytest.approx((27 / 25 - 1, 27 / 30 - 1))


def test_the_time_to_a_loss_lies_between_evaluations():
    curve = [(0.0, 4.0), (10.0, 3.0), (20.0, 2.0), (30.0, 2.5), (40.0, 1.5)]
    assert seconds_to(2.5, curve) == 15.0 and seconds_to(2.0, curve) == 20.0
    assert seconds_to(1.0, curve) is None and seconds_to(2.5, [(0.0, 4.0), (9.0, None)]) is None


def test_training_time_is_of_median_steps_and_nothing_else():
    lines = [{'iter': 0, 'train_loss': 4.0, 'val_loss': 4.0}]
    lines += [{'iter': 5 * k, 'tokens_per_s': rate, 'peak_memory_bytes': 100 * k}
              for k, rate in ((1, 8.0), (2, 256.0), (3, 256.0), (4, 512.0))]
    lines += [{'iter': 20, 'train_loss': 2.0, 'val_loss': 3.0}]
    found = numbers(lines, SMALL)  # 256 tokens a step
    assert found == {'memory_bytes': 400, 'step_ms': 1000.0, 'train_s': 20.0, 'final_loss': 3.0,
                     'curve': [(0.0, 4.0), (20.0, 3.0)]}


def fake_train(config):
    if config.dtype == 'float16':
        raise UserError('no float16 here')
    loss = 3.0 + config.seed / 1e5
    return [{'iter': 0, 'val_loss': 4.0},
            {'iter': 20, 'tokens_per_s': config.step_tokens() / 0.5, 'peak_memory_bytes': 2**20},
            {'iter': 20, 'val_loss': loss}]


def run_small(monkeypatch, seeds=2):
    monkeypatch.setattr(grid, 'train', fake_train)
    runs = run_all(SMALL, seeds, lambda cell: cell.gpt_config(65), torch.device('cpu'))
    for run in runs:
        run.update(target_loss=3.5, target_s=seconds_to(3.5, run['curve']))
    return runs


def test_a_cell_that_fails_is_told_and_the_others_stand(monkeypatch, tmp_path):
    runs = run_small(monkeypatch)
    assert len(runs) == 48 and sum(bool(run['failed']) for run in runs) == 8
    text = tables(runs, 3.5, 'x')
    assert text.count('no float16 here') == 8
    losses = text.split('| final validation loss')[1].split('\n\n')[0].splitlines()[2:]
    cells = [cell.strip() for line in losses for cell in line.split('|')[2:-1]]
    assert len(cells) == 24 and cells.count('–') == 4
    assert cells[0] == '3.013 ± 0.000'
    draw(runs, tmp_path / 'grid.png')
    assert (tmp_path / 'grid.png').stat().st_size > 10_000


def test_a_grid_that_was_killed_goes_on(monkeypatch, tmp_path):
    made = []

    def train(config):
        if len(made) == 30:
            raise KeyboardInterrupt
        made.append(config)
        return fake_train(replace(config, dtype='float32'))

    def grid_of(config=SMALL, where='here'):
        return run_all(config, 2, lambda cell: cell.gpt_config(65), torch.device('cpu'),
                       tmp_path / 'grid.jsonl', where)

    monkeypatch.setattr(grid, 'train', train)
    with pytest.raises(KeyboardInterrupt):
        grid_of()
    made.append(None)  # past the 30th
    with (tmp_path / 'grid.jsonl').open('a') as f:
        f.write('{"key": "cut')
    first = grid_of()
    assert len(made) == 1 + 48 and len(first) == 48
    assert [(run['row'], run['column']) for run in first] == 2 * CELLS
    again = grid_of()
    assert json.dumps(again) == json.dumps(first) and len(made) == 49
    grid_of(where='elsewhere')
    grid_of(replace(SMALL, max_iters=40))
    assert len(made) == 49 + 2 * 48


def test_a_default_that_fails_ends_it(monkeypatch):
    def broken(config):
        raise UserError('data/none is not prepared')

    monkeypatch.setattr(grid, 'train', broken)
    with pytest.raises(UserError, match='not prepared'):
        run_all(SMALL, 1, lambda cell: cell.gpt_config(65), torch.device('cpu'))


def test_a_cell_is_a_training_run(char_data, tmp_path):
    config = replace(settings(SMALL, 'default', 'SGD + cosine'), dataset=str(char_data),
                     out_dir=str(tmp_path / 'out'), eval_interval=10, eval_iters=2, device='cpu')
    found = numbers(grid.train(config), config)
    assert [round(seconds / found['train_s'], 6) for seconds, _ in found['curve']] == [0, 0.5, 1]
    assert found['final_loss'] < found['curve'][0][1] and found['memory_bytes'] > 2**20
    with pytest.raises(UserError, match='not prepared'):
        grid.train(replace(config, dataset=str(tmp_path / 'none')))
