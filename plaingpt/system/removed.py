"""Settings and options of earlier versions, and what says the same now.

Command lines, config files, lists of variants, checkpoints and run.json may have them.
"""

import os
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from plaingpt.system.errors import UserError, warn


class Removed(NamedTuple):
    use: str  # what to use now, where nothing says the same
    says: Callable = None  # (value, other settings) → {setting: value} that say the same, or None
    is_left_out: bool = False  # it changes no loss: a run that says it trains, with a warning


def lr_scale(kind):
    """The factor of one kind of weights → lr_scales with it."""
    def says(value, settings):
        parts = dict(part.split(':') for part in settings.get('lr_scales', '').split(',') if part)
        parts[kind] = str(value).removesuffix('.0')
        return {'lr_scales': ','.join(f'{kind}:{x}' for kind, x in sorted(parts.items())
                                      if x != '1')}
    return Removed(f'lr_scales={kind}:NUMBER', says)


def wsd_decay(value, settings):
    is_wsd = settings.get('lr_schedule') == 'wsd'
    return {'lr_schedule': f'wsd:{value}'} if is_wsd and value != 0.2 else {}


def eval_tokens(value, settings):
    if not value or settings['batch_size'] == 'auto':
        return None if value else {}
    return {'eval_iters': max(1, value // (settings['batch_size'] * settings['block_size']))}


def overfit_batches(value, settings):
    return {'check': 'overfit'} if value else {}


def eval_tasks_interval(value, settings):
    return None if value else {'eval_tasks': ''}  # it named tasks, and never ran them


def only(known):
    """This version computes with one value alone, or with that of another setting."""
    return Removed('this version has no such setting: leave it out',
                   lambda value, settings: {} if value in (known, settings.get(known)) else None)


def left_out(use):
    return Removed(use, is_left_out=True)


NO_LAW = 'python plan.py CONFIG says what a run of any config takes'
REMOVED = {
    # training: another setting says it
    'embedding_lr_scale': lr_scale('embedding'),
    'head_lr_scale': lr_scale('head'),
    'vector_lr_scale': lr_scale('vector'),
    'wsd_decay': Removed('lr_schedule=wsd:0.2 falls in the last fifth', wsd_decay),
    'eval_tokens': Removed('eval_iters says how many batches an evaluation reads', eval_tokens),
    'overfit_batches': Removed('--check=overfit trains on the first batch alone', overfit_batches),
    'eval_tasks_interval': Removed('eval_tasks run at evaluations, every eval_interval iterations',
                                   eval_tasks_interval),
    # training: it follows from something else, or is the same for all
    'document_start': left_out('it is the token that opens the documents of the dataset'),
    'data_in_ram': left_out('tokens are read into memory where there is room'),
    'checkpoint_async': left_out('on CUDA a checkpoint is written while training goes on'),
    'keep_checkpoints': left_out('the two newest checkpoints are kept, and the best'),
    'loss_chunk_tokens': left_out('the loss is always computed in chunks'),
    'health_interval': left_out('health is measured every 100 iterations, or five times in a run'),
    'sample_interval': left_out('evaluations write samples, and report.md shows them'),
    'sample_start': left_out('a sample continues an empty line; sample.py has --start'),
    'sample_tokens': left_out('a sample has 100 tokens; --report=False leaves out those that '
                             'evaluations make'),
    'also_evaluate': Removed('python evaluate.py OUT_DIR --dataset=NAME scores a run on another '
                             'dataset'),
    'checkpoint_chunk_mb': Removed('no file of a checkpoint is larger than 512 MB'),
    'deterministic': Removed('write import torch; torch.use_deterministic_algorithms(True) into a '
                             'config file'),
    'dist_timeout_s': Removed('it is TIMEOUT in plaingpt/system/distributed.py, ten minutes'),
    'fsdp_group': Removed('with --parallel=fsdp all processes share one copy of the model'),
    'max_bad_steps': Removed('a run ends after ten steps in a row that are not finite'),
    # the model and its optimizer
    'rotary_share': only(1.0),
    'embedding_norm': only(False),
    'qk_scale': only(0.0),
    'head_bias': only(False),
    'logit_softcap': only(0.0),
    'softcap': only('tanh'),
    'adam_eps': only(1e-8),
    'muon_scale': only('match_rms_adamw'),
    'muon_iterations': only('quintic'),
    'embedding_decay': only('weight_decay'),
    'vector_decay': only(0.0),
    # other commands
    'law': Removed(NO_LAW),
    'hours': Removed(NO_LAW),
    'price': Removed(NO_LAW),
    'gpu_hour_price': Removed(NO_LAW),
    'gpu': Removed('plan.py takes --gpu_memory_gb'),
    'tokens_per_s': Removed('plan.py measures a step on this machine'),
    'utilisation': Removed('plan.py measures a step on this machine'),
    'json': Removed('plan.py prints text, and bench.py --save=FOLDER writes a CSV'),
    'ledger': Removed('give bench.py --judge --save=FOLDER'),
    'equal': Removed('bench.py --judge says what a step takes'),
    **dict.fromkeys(('patch', 'change', 'set', 'least'), Removed(
        'bench.py --judge --against=COMMIT compares the code as it is here with a commit')),
    'profile': Removed('torch.profiler.profile() around a step shows where its time goes'),
    'real_data': Removed('bench.py times a step on random tokens'),
    'warmup_steps': Removed('three steps are not counted'),
    'target_loss': Removed('the table of bench.py has final losses and ms a step, and plot.py '
                           'FOLDER… the curves'),
    'sources': Removed('python prepare.py inspect says how much of the validation text is in the '
                       'training text'),
    'api_key': Removed('put it into the environment as PLAINGPT_API_KEY'),
    'model_name': Removed('serve.py answers whatever model a request names'),
    'reference': Removed('plot.py finds the reference of a run by its settings and text'),
    'live': Removed('run plot.py again, or train with --log_to=tensorboard'),
    'every': Removed('run plot.py again, or train with --log_to=tensorboard'),
    'memory': Removed('python plan.py CONFIG says what memory a step takes, by stage and owner'),
    'max_waiting': Removed('serve.py lets 16 requests wait'),
    'max_tokens': Removed('a request to serve.py says its own, and sample.py has max_new_tokens'),
    'license': Removed('write it at the head of README.md in the exported folder'),
    'datasets': Removed('write them at the head of README.md in the exported folder'),
    'prompts': Removed('plaingpt.load(OUT_DIR).generate(TEXTS) continues a list of texts'),
    'min_p': Removed('top_p and top_k leave out tokens that are not likely'),
    'end_of_text': Removed('a text always ends where the model ends a document'),
    'template': Removed('a model that was tuned on conversations brings the form of them'),
    'split': Removed('evaluate.py takes it as a task: --tasks=test'),
    'include_path': Removed('name the .yaml file of a task of your own: --tasks=mine.yaml'),
    'num_fewshot': Removed('lm_eval itself takes it, on a folder that export.py wrote'),
    'lm_eval': Removed('name its tasks with --tasks=TASK'),
    'format': Removed('the fields of a row tell its form; --prompt and --completion name its '
                      'columns'),
    'max_shards': Removed('hf download --include=PATTERN fetches some files of a repository'),
    'dedup': Removed('leave out copies before: sort -u for lines, polars or datatrove for rows'),
    'path': Removed('--input names it', lambda value, settings: {'input': value}),
    'errors': Removed('--encoding says what the bytes of a text are; iconv -c drops those that are '
                      'none'),
    'test_split': Removed('prepare it as a dataset of its own, with --split, for evaluate.py '
                          '--dataset'),
    'html': Removed('make text of HTML pages with trafilatura or pandoc, and prepare that')}


def says_now(name, value, settings):
    """{setting: value} that say what a removed setting says beside other `settings`; {} where it
    changes nothing, None where nothing says it, or its value is no such setting's."""
    if not REMOVED[name].says:
        return {}
    try:
        return REMOVED[name].says(value, settings)
    except (TypeError, ValueError):
        return None


def as_today(settings):
    """{name: value} of a run of an earlier version, in the settings of this one."""
    found = {name: value for name, value in settings.items() if name not in REMOVED}
    for name, value in settings.items():
        if name in REMOVED:
            found |= says_now(name, value, found) or {}
    return found


def in_todays_words(settings, source, unknown=False):
    """as_today(settings). Raises UserError where one says what this version cannot. source: where
    they are; unknown: whether a name that never was a setting is such a one"""
    for name, value in settings.items():
        if says_now(name, value, settings) is None if name in REMOVED else unknown:
            raise UserError(f'{source} is from another version of plainGPT: it has {name}={value}, '
                            'which this one does not know')
    return as_today(settings)


def replace_removed(name, value, where, values, problems):
    """What a setting of an earlier version says now, {setting: value}, among the `values` of a
    command. Where nothing says it, a problem tells what to use."""
    old, now = REMOVED[name], says_now(name, value, values)
    if old.is_left_out and 'max_iters' in values:
        warn_once(f'{name} {where} is left out: {old.use}')
        return {}
    if not old.says or now is None or not now.keys() <= values.keys():
        problems.append(f'unknown setting {name} {where}: it was removed; {old.use}')
        return {}
    return now


@cache  # arguments may be read twice
def warn_once(line):
    if os.environ.get('RANK', '0') == '0':
        warn(line)
