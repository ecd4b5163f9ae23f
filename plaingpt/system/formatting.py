"""Numbers and errors as people read them."""

GIB = 2**30


def short(n):
    """1234567 → '1.23M': three digits and a unit."""
    units = ['', 'k', 'M', 'G']
    while n >= 999.5 and len(units) > 1:
        n /= 1000
        units.pop(0)
    return f'{n:#.3g}'.rstrip('.') + units[0]


def duration(seconds):
    """3725 → '1h02m', 65 → '1m05s', 5 → '5s'."""
    if seconds > 365 * 24 * 3600:
        return f'{seconds / (365 * 24 * 3600):.3g} years'
    s = round(seconds)
    if s >= 3600:
        return f'{s // 3600}h{s % 3600 // 60:02d}m'
    return f'{s // 60}m{s % 60:02d}s' if s >= 60 else f'{s}s'


def one_line(problem):
    """The first line of an exception's message."""
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]


def gib(size):
    """1717986918 → '1.60 GiB', less than a tenth of one as MiB."""
    return f'{size / GIB:.2f} GiB' if size >= GIB / 10 else f'{size / 2**20:.1f} MiB'
