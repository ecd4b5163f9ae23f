"""How pictures of runs look: panels with a question and its answer, lines named at their ends."""

import io
import textwrap
from dataclasses import dataclass, field

from plaingpt.system.errors import needs
from plaingpt.system.files import write_atomically
from plaingpt.system.formatting import printable

# Okabe and Ito 2008: colour-blind people tell them apart, and in grey each differs from the next
COLOURS = ('#0072B2', '#E69F00', '#009E73', '#D55E00', '#56B4E9', '#CC79A7')
GREY = '#666666'
WIDTH, DPI = 10, 140  # inches of a picture: on a page of 700 pixels a point is about a pixel
SMALL, MEDIUM, LARGE = 11, 12, 13  # points
LEFT, RIGHT, TOP, BOTTOM = 0.9, 0.1, 1.0, 0.65  # inches around the axes of a panel
QUESTION = 0.25  # inches of TOP that a question takes
LOG = 20  # a y axis is logarithmic where its values differ by this factor
LABEL_ROOM = 0.45  # of the width of the axes, at most, for names at the ends of lines


@dataclass
class Line:
    """A line of a panel, or a dot where it has a single point."""

    xs: list
    ys: list
    label: str = ''  # written at its end
    colour: str = COLOURS[0]
    errors: list | None = None  # of each point: a bar
    faint: bool = False  # behind the others, and the axes need not hold it
    style: dict = field(default_factory=dict)


@dataclass
class Panel:
    """A coordinate system with lines. What it shows is said in its headline."""

    headline: str
    lines: list
    question: str = ''
    x_label: str = 'iteration'
    y_label: str = ''
    from_zero: bool = False  # the y axis, which is never logarithmic then
    band: tuple | None = None  # (xs, lows, highs) of a reference
    ring: tuple | None = None  # (x, y, text): a point that is named
    ticks: list | None = None  # names of 0, 1, 2, … on the x axis


def save_figure(panels, path, height=4.6):
    """Draw panels, two beside each other, into a PNG. Raises UserError without matplotlib."""
    picture = io.BytesIO()
    make_figure(panels, height).savefig(picture, dpi=DPI)
    write_atomically(path, picture.getvalue())


def make_figure(panels, height=4.6):
    """→ the Figure of panels; height: of each, in inches"""
    with needs('matplotlib', 'drawing curves'):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    width, total = WIDTH / columns, height * rows
    figure = Figure(figsize=(WIDTH, total))
    FigureCanvasAgg(figure)
    for i, panel in enumerate(panels):
        left, bottom = i % columns * width + LEFT, total - (i // columns + 1) * height + BOTTOM
        top = TOP if panel.question else TOP - QUESTION
        size = width - LEFT - RIGHT, height - top - BOTTOM
        axes = figure.add_axes((left / WIDTH, bottom / total, size[0] / WIDTH, size[1] / total))
        write_headline(axes, panel, *size)
        draw_lines(axes, panel)
        scale_axes(axes, panel, *size)
        name_lines(axes, panel, size[1])
    return figure


def write_headline(axes, panel, width, height):
    """The question in grey above its answer; width, height: of the axes, in inches"""
    text = textwrap.fill(plain(panel.headline), round(9.2 * (width + 0.6)),
                         break_on_hyphens=False)
    left, top = (0.15 - LEFT) / width, 1 + (TOP - 0.12) / height
    if panel.question:
        axes.text(left, top, plain(panel.question), transform=axes.transAxes, va='top',
                  fontsize=MEDIUM, color=GREY)
    axes.set_title(text, fontsize=LARGE, weight='bold', loc='left', linespacing=1.15, x=left,
                   y=top - QUESTION / height, va='top')


def draw_lines(axes, panel):
    if panel.band:
        xs, lows, highs = panel.band
        axes.fill_between(xs, lows, highs, color='black', alpha=0.15, lw=0)
    for line in panel.lines:
        style = {'lw': 0.8, 'alpha': 0.35} if line.faint else {'lw': 2, 'ms': 5}
        if len(line.xs) == 1 and not line.faint:
            style['marker'] = 'o'
        axes.errorbar(line.xs, line.ys, line.errors, color=line.colour, capsize=3, elinewidth=1.2,
                      **{**style, **line.style})
    if panel.ring:
        x, y, text = panel.ring
        axes.plot([x], [y], 'o', ms=12, mfc='none', mec='black', mew=1.2)
        axes.annotate(text, (x, y), (0, 13), textcoords='offset points', ha='center', va='bottom',
                      fontsize=SMALL)
    axes.set_ylabel(panel.y_label, fontsize=MEDIUM)
    axes.tick_params(labelsize=SMALL)
    axes.grid(axis='y', alpha=0.25)
    axes.spines[['top', 'right']].set_visible(False)


def scale_axes(axes, panel, width, height):
    """Ranges and ticks. Right of the last point is room for the names of lines."""
    from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter
    lines = [line for line in panel.lines if not line.faint] or panel.lines
    ys = [y + sign * error for line in lines for sign in (-1, 1)
          for y, error in zip(line.ys, line.errors or [0] * len(line.ys), strict=True)]
    if panel.band:
        ys += [*panel.band[1], *panel.band[2]]
    positive = [y for y in ys if y > 0]
    if positive and max(positive) > LOG * min(positive) and min(ys) >= 0 and not panel.from_zero:
        axes.set_yscale('log', nonpositive='mask')  # zeros are left out
        axes.set_ylim(min(positive) / 1.3, max(positive) * 1.3)
        axes.yaxis.set_major_formatter(lambda value, _: f'{value:g}')
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        margin = 0.06 * (max(ys) - min(ys)) or 0.05 * abs(max(ys)) or 1
        axes.set_ylim(min(ys) - margin, max(ys) + margin)
        if panel.from_zero:
            axes.set_ylim(0, 1.06 * max(ys) or 1)
    xs = [x for line in lines for x in line.xs]
    first, last = min(xs), max(xs) + (len(set(xs)) == 1)
    longest = max((len(line.label) for line in panel.lines), default=0)
    share = max(0.06, min(LABEL_ROOM, 0.62 * MEDIUM / 72 * longest / width + 0.03))
    axes.set_xlim(first - 0.03 * (last - first), first + (last - first) / (1 - share))
    axes.set_xlabel(panel.x_label, fontsize=MEDIUM, x=(1 - share) / 2)
    axes.spines.bottom.set_bounds(first, last)
    if panel.ticks is not None:
        axes.set_xticks(range(len(panel.ticks)), panel.ticks)
        return
    places = MaxNLocator(max(3, round((1 - share) * width * 1.6)), steps=[1, 2, 2.5, 5, 10],
                         integer=panel.x_label in ('iteration', 'tokens'))
    axes.set_xticks([x for x in places.tick_values(first, last) if first <= x <= last])
    for axis in (axes.xaxis, axes.yaxis):
        if max(map(abs, axis.get_majorticklocs())) >= 10_000:
            axis.set_major_formatter(EngFormatter(sep=''))  # 250k


def name_lines(axes, panel, height):
    """The names of lines right of the axes, moved apart where they would overlap. A thin line leads
    from a line that ends early to its name."""
    lines = sorted((line for line in panel.lines if line.label), key=lambda line: line.ys[-1])
    if not lines:
        return
    to_axes = axes.transScale + axes.transLimits
    ends = [min(1, max(0, to_axes.transform((line.xs[-1], line.ys[-1]))[1])) for line in lines]
    size = min(MEDIUM, height * 72 / 1.2 / len(lines))
    right = to_axes.transform((axes.spines.bottom.get_bounds()[1], 1))[0]
    for line, end, y in zip(lines, ends, spread(ends, 1.2 * size / 72 / height), strict=True):
        x = to_axes.transform((line.xs[-1], 1))[0]
        if x < right - 0.03:
            axes.plot([x, right], [end, y], ':', transform=axes.transAxes, color=line.colour, lw=1,
                      zorder=0)
        axes.text(right + 0.02, y, plain(line.label), transform=axes.transAxes, va='center',
                  fontsize=size, color=darker(line.colour))


def spread(places, gap):
    """Ascending places between 0 and 1 → the same, `gap` or more apart."""
    found = list(places)
    for i in range(1, len(found)):
        found[i] = max(found[i], found[i - 1] + gap)
    limit = 1.0
    for i in reversed(range(len(found))):
        found[i] = limit = min(found[i], limit)
        limit -= gap
    return found


def darker(colour):
    """A colour as text on white can be read in."""
    from matplotlib.colors import to_rgb
    return [0.72 * part for part in to_rgb(colour)]


def plain(text):
    """Text as matplotlib shows it, which takes what is between two $ for a formula."""
    return printable(text).replace('$', r'\$')


def choose_colours(n):
    """n different colours; beyond the palette those of a map from dark to light."""
    if n <= len(COLOURS):
        return COLOURS[:n]
    with needs('matplotlib', 'drawing curves'):
        from matplotlib import colormaps
        from matplotlib.colors import to_hex
    return [to_hex(colormaps['viridis'](0.9 * i / (n - 1))) for i in range(n)]
