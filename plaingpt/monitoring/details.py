"""What runs logged beside their losses, as panels: learning rate, gradients, speed, memory and the
health of layers. Each headline says what is seen, computed from the rows."""

import re
from statistics import median

from plaingpt.monitoring.drawing import COLOURS, Line, Panel, choose_colours
from plaingpt.monitoring.metrics_file import column, rows_with
from plaingpt.system.formatting import capitalized, short

FLAT = 0.01  # a panel whose values differ by less than this share of the largest is left out
SPIKE = 5  # times the median of its neighbours
HEALTH = {  # measure of a layer → what its panel says
    'grad_norm': 'gradient norms of layers', 'weight_norm': 'weight norms',
    'update_ratio': 'updates / weights', 'activation_rms': 'RMS of activations',
    'attention_logit': 'largest attention logits', 'dead_units': 'shares of silent MLP units'}
# These may differ by factors, which a logarithmic axis shows.
SPREAD = {'grad_norm', 'update_ratio', 'attention_logit'}


def detail_panels(runs):
    """Runs, [(name, rows)] → the Panels that show a change."""
    panels = [column_panel(runs, 'lr', 'learning rate', describe_rate),
              column_panel(runs, 'grad_norm', 'gradient norm', describe_gradients),
              column_panel(runs, 'tokens_per_s', 'tokens a second', describe_speed),
              column_panel(runs, 'peak_memory_bytes', 'memory in MiB', describe_memory, 2**20),
              *(layer_panel(runs, measure, what) for measure, what in HEALTH.items()),
              position_panel(runs)]
    return [panel for panel in panels if panel and not is_flat(panel)]


def is_flat(panel):
    """Whether no line rises or falls, and lines do not differ."""
    values = [y for line in panel.lines for y in line.ys]
    height = 1 if panel.y_label == HEALTH['dead_units'] else max(map(abs, values))
    return all(len(line.xs) < 2 for line in panel.lines) \
        or max(values) - min(values) <= FLAT * height


def column_panel(runs, key, what, describe, scale=1):
    """The Panel of a logged number, None where no run has it. describe: (iterations, values) → the
    headline of a single run"""
    lines = []
    for (name, rows), colour in zip(runs, choose_colours(len(runs)), strict=True):
        if seen := rows_with(rows, key):
            lines.append(Line(column(seen, 'iter'), [y / scale for y in column(seen, key)],
                              name * (len(runs) > 1), colour, style={'lw': 1.3}))
    if not lines:
        return None
    if len(runs) == 1:
        headline = describe(lines[0].xs, lines[0].ys)
    else:
        medians = describe_range([(median(line.ys), line.label) for line in lines])
        headline = f'{capitalized(what)}, median: {medians}'
    return Panel(headline, lines, y_label=what, from_zero=key not in SPREAD)


def describe_range(values):
    """[(number, name)] → '3.1 (a) to 4.5 (b)', of more than three the lowest and the highest"""
    (low, a), (high, b) = min(values), max(values)
    return f'{figure(low)} ({a})' + f' to {figure(high)} ({b})' * (len(values) > 1)


def figure(value):
    """Three digits: 12.3k, 4.56, 1.2e-05"""
    return short(value) if value >= 1 or value == 0 else f'{value:.2g}'


def describe_rate(xs, ys):
    top = max(ys)
    at = xs[ys.index(top)]
    rose = 'rose to' if at > xs[0] else 'was'  # a warmup may have ended before the first row
    fell = f' and fell to {figure(ys[-1])}' if ys[-1] < top else ''
    return f'The learning rate {rose} {figure(top)} at iteration {at:,}{fell}'


def describe_gradients(xs, ys):
    part = max(1, len(ys) // 10)
    first, last = median(ys[:part]), median(ys[-part:])
    spikes = [(y, x) for i, (x, y) in enumerate(zip(xs, ys, strict=True))
              if i >= part and y > SPIKE * median(ys[max(0, i - 5):i + 6])]
    said = f'Gradient norms {"fell" if last < first else "rose"} from {figure(first)} to ' \
           f'{figure(last)}' if abs(last - first) > 0.1 * first else \
        f'Gradient norms stayed near {figure(last)}'
    if not spikes:
        return f'{said}, without a spike'
    highest, at = max(spikes)
    return f'{said}; {len(spikes)} spike{"s" * (len(spikes) > 1)}, up to {figure(highest)} at ' \
           f'iteration {at:,}'


def describe_speed(xs, ys):
    return f'{figure(median(ys))} tokens a second at the median, {figure(min(ys))} to ' \
           f'{figure(max(ys))}'


def describe_memory(xs, ys):
    return f'Memory {"fell" if ys[-1] < ys[0] else "grew"} from {ys[0]:,.0f} to {ys[-1]:,.0f} MiB'


def layer_panel(runs, measure, what):
    """The Panel of a health measure of the first and the last block, of a single run also of a
    middle block and of the token embedding; None where no run has it."""
    prefix, lines = f'health/{measure}/', []
    for (name, rows), colour in zip(runs, choose_colours(len(runs)), strict=True):
        layers = {key.removeprefix(prefix) for row in rows for key in row if key.startswith(prefix)}
        blocks = sorted((layer for layer in layers if re.fullmatch('h[.][0-9]+', layer)),
                        key=lambda layer: (len(layer), layer))
        middle = blocks[len(blocks) // 2:][:1]
        chosen = [*blocks[:1], *blocks[-1:]] if len(runs) > 1 else \
            [*blocks[:1], *middle, *blocks[-1:], *(layers & {'wte'})]
        for n, layer in enumerate(dict.fromkeys(chosen)):
            if seen := rows_with(rows, prefix + layer):
                lines.append(Line(
                    column(seen, 'iter'), column(seen, prefix + layer),
                    layer if len(runs) == 1 else f'{name} {layer}',
                    COLOURS[n] if len(runs) == 1 else colour,
                    style={'lw': 1.5, 'ls': '-' if len(runs) == 1 or not n else '--'}))
    if not lines:
        return None
    ends = describe_range([(line.ys[-1], line.label) for line in lines])
    verb = 'ends' if measure == 'activation_rms' else 'end'
    return Panel(f'{capitalized(what)} {verb} at {ends} among the layers drawn', lines,
                 y_label=what, from_zero=measure not in SPREAD)


def position_panel(runs):
    """How the loss falls with the position in the sequence, at the last health check; None where no
    run has one."""
    prefix, found = 'health/loss_at/', []  # [(name, colour, {place: loss})]
    for (name, rows), colour in zip(runs, choose_colours(len(runs)), strict=True):
        row = next((row for row in reversed(rows) if f'{prefix}0' in row), {})
        if losses := {key.removeprefix(prefix): value for key, value in row.items()
                      if key.startswith(prefix) and value is not None}:
            found.append((name, colour, losses))
    if not found:
        return None
    # Models of several block sizes have other ranges of positions.
    places = sorted({place for *_, losses in found for place in losses},
                    key=lambda place: [int(n) for n in re.findall('[0-9]+', place)])
    lines = [Line([places.index(place) for place in losses], list(losses.values()),
                  name * (len(runs) > 1), colour, style={'marker': 'o'})
             for name, colour, losses in found]
    name, _, losses = found[0]
    first, best = next(iter(losses)), min(losses, key=losses.get)
    said = f'tokens at position {first} cost {losses[first]:.2f}, at {best} the least: ' \
           f'{losses[best]:.2f}' if losses[best] < losses[first] else \
        f'later positions are not cheaper than the first: {losses[first]:.2f}'
    headline = f'{name}: {said}' if len(runs) > 1 else capitalized(said)
    return Panel(headline, lines, x_label='position in the sequence', y_label='nats a token',
                 ticks=places)
