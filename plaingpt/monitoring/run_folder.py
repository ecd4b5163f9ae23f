"""The out_dir of a run when it begins and when it ends: a previous run moves away, run.json and the
report are written, and the last lines say what to do next."""

import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from plaingpt.core.checkpoint import checkpoint_paths, checksum, clean_up, find, iteration_of
from plaingpt.core.progress import FINISHED, TIME_UP
from plaingpt.core.settings import NOT_COMPARED
from plaingpt.monitoring.references import find_reference
from plaingpt.monitoring.run_record import RUN_FILES, read_run, trim_rows
from plaingpt.monitoring.run_report import write_report
from plaingpt.system.devices import machine_name
from plaingpt.system.distributed import StopRequest, launched_world, print0
from plaingpt.system.errors import UserError
from plaingpt.system.files import make_writable, write_json
from plaingpt.system.formatting import command_for, quoted


def open_run_folder(run):
    """Archive what this Run would overwrite, and write its initial run.json. Returns the
    contents of run.json. Only rank 0 writes, and a run that only evaluates does not."""
    config, progress, resumed = run.config, run.progress, run.start.resumed
    out_dir = Path(config.out_dir)
    record = describe_run(run)
    record['reference'] = find_reference(record, NOT_COMPARED)
    if not launched_world().is_main:
        return record
    if not resumed and len(run.dataset.components) > 1:
        from plaingpt.data.overlap import compare_corpora
        compare_corpora([component.dataset for component in run.dataset.components])
    if config.is_read_only:
        return record
    make_writable(out_dir / 'checkpoints')
    archive = archive_previous_run(out_dir, progress.iter_num if resumed else -1)
    if archive:
        moved = 'later steps' if resumed else 'the previous run'
        print0(f'moved {moved} to {archive}')
        record['went_back_to'] = progress.iter_num if resumed else None
    if resumed:
        for name in RUN_FILES:
            if name.endswith('.jsonl') and (out_dir / name).exists():
                trim_rows(out_dir / name, progress.iter_num, progress.evaluated)
    write_json(out_dir / 'run.json', record)
    return record


def describe_run(run):
    """The contents of run.json for a Run."""
    config, dataset = run.config, run.dataset
    if run.start.resumed:
        from_scratch = read_run(config.out_dir).get('from_scratch', True)
    else:
        from_scratch = config.init_from in ('scratch', 'auto')
    return {
        'config': asdict(config), 'changed': changed_settings(config),
        'data': {'folder': str(dataset.folder), 'source': dataset.meta.get('source', {}),
                 'val': checksum(dataset.identity('val'))},
        'vocab_size': dataset.vocab_size, 'train_tokens': run.train_data.epoch_tokens(),
        'val_bytes_per_token': dataset.bytes_per_token('val'),
        'from_scratch': from_scratch,
        'machine': {'device': machine_name(run.step.device), 'processes': launched_world().size},
        'dtype': run.step.dtype, 'compile': run.step.compile,
        'versions': {'torch': torch.__version__},
        'command': ' '.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def changed_settings(config):
    """The resolved() settings of a TrainConfig that differ from the defaults."""
    defaults = type(config)().resolved()
    return {key: value for key, value in config.resolved().items() if value != defaults[key]}


def archive_previous_run(out_dir, after=-1):
    """Move the checkpoints after an iteration, and the run's other files, to out_dir/old-001 (002,
    …). Return that folder, or None if there is nothing to move. If the run in out_dir is resumed
    (after ≥ 0), the other files are copied. Incomplete checkpoints are removed. Raises UserError.
    """
    out_dir = Path(out_dir)
    clean_up(out_dir)
    checkpoints = [path for path in checkpoint_paths(out_dir) if iteration_of(path) > after]
    files = [out_dir / name for name in RUN_FILES if (out_dir / name).exists()]
    if not checkpoints and (after >= 0 or not files):
        return None
    numbers = [int(path.name[4:]) for path in out_dir.glob('old-*') if path.name[4:].isdecimal()]
    archive = out_dir / f'old-{max(numbers, default=0) + 1:03d}'
    try:
        (archive / 'checkpoints').mkdir(parents=True)
        for path in files:
            if after < 0:
                shutil.move(path, archive / path.name)
            elif path.is_file():  # TensorBoard's folder is written again
                shutil.copy2(path, archive / path.name)
        for path in checkpoints:
            shutil.move(path, archive / 'checkpoints' / path.name)
    except OSError as e:
        raise UserError(f'{archive}: cannot move the previous run there ({e.strerror}): choose '
                        'another --out_dir') from None
    return archive


def close_run_folder(run, record, ending):
    """Write the final run.json and the report, and print how the run ended, which `ending` says.
    Raises UserError if it gave up; exits with status 1 if its last checkpoint was not saved."""
    config, out_dir = run.config, run.config.out_dir
    is_main = launched_world().is_main
    if is_main and not config.eval_only:
        record = dict(record, config=asdict(config), ending=ending,
                      end=run.log.at(run.progress.iter_num))
        write_json(Path(out_dir, 'run.json'), record)
        if config.report:
            write_report(out_dir, record, print0)
        if config.film and Path(out_dir, 'film.jsonl').exists():
            print0(f'recorded film.jsonl; to view it: {command_for("plot")} --film '
                   f'{quoted(out_dir)}')
    if run.step.bad_steps.gave_up:
        raise run.step.bad_steps.error(out_dir)
    if run.saver.failed:
        print0(f'{out_dir}: could not save the last checkpoint (see the warning above); to resume '
               'from the previous one, repeat the command with --init_from=auto')
        sys.exit(1)
    if is_main and not config.eval_only:
        for line in closing_lines(run, ending):
            print0(line)


def closing_lines(run, ending):
    """Console lines that say how the run ended and what to do next."""
    iter_num = run.progress.iter_num
    out_dir_option = f'--out_dir={quoted(run.config.out_dir)}'
    if ending in StopRequest.NAMES and not iter_num:
        return [f'{ending}: stopped before the first iteration; there is nothing to resume']
    if ending in StopRequest.NAMES:
        return [f'{ending}: stopped after iteration {iter_num}; to resume: '
                f'{command_for("train")} {out_dir_option} --init_from=resume']
    if run.start.resumed and run.start.checkpoint.iter_num == iter_num:
        reason = f'{iter_num} of {run.config.max_iters}' if ending == FINISHED else ending
        return [f'this run is already finished ({reason}); to continue, raise --max_iters or '
                '--minutes, or set --patience=0']
    lines = []
    if ending not in (FINISHED, TIME_UP):
        lines.append(f'stopped after iteration {iter_num}: {ending}')
    if not iter_num:
        return lines
    lines.append(f'done: saved checkpoints in {run.config.out_dir}/checkpoints; '
                 f'to sample: {command_for("sample")} {out_dir_option}')
    best = find(run.config.out_dir, 'best')
    if best.iter_num != iter_num:
        lines.append(f'sample.py uses the best checkpoint (iteration {best.iter_num}, '
                     f'validation loss {best.val_loss:.4f}); --checkpoint=latest uses the last '
                     'one')
    return lines
