"""Draws the results of bench/run.py: time relative to MPI, and how near it is to the floor."""

import json
from xml.sax.saxutils import escape

WIDTH = 960
LABEL_X = 28  # names of the runs
BAR_X, BAR_WIDTH = 118, 450  # time relative to MPI
FLOOR_X, FLOOR_WIDTH = 770, 150  # fraction of the floor
ROW, BAR = 26, 16  # height of a row, of a bar in it
TOP = 118

# Class -> property, colour on light, colour on dark paper. Plain rules, no CSS variables: not every
# viewer of SVG knows those.
COLOURS = {
    ".paper": ("fill", "#ffffff", "#0d1117"),
    "text": ("fill", "#1b1f24", "#e6edf3"),
    ".soft": ("fill", "#59636e", "#9198a1"),
    ".mpi": ("fill", "#c3ccd5", "#4d5762"),
    ".ours": ("fill", "#0b6bcb", "#4b9cf5"),
    ".floor": ("fill", "#1a8754", "#3fb27f"),
    ".line": ("stroke", "#d1d9e0", "#30363d"),
    ".limit": ("stroke", "#c93c37", "#ff7b72"),
}
FONTS = """
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
.title { font-size: 20px; font-weight: 650; }
.case { font-weight: 650; }
.soft { font-size: 12px; }
.end { text-anchor: end; }
.track { fill: none; }
.limit { stroke-width: 2; }"""


def style():
    def rules(mode):
        return " ".join(f"{name} {{ {colour[0]}: {colour[mode]}; }}"
                        for name, colour in COLOURS.items())
    return f"{FONTS}\n{rules(1)}\n@media (prefers-color-scheme: dark) {{ {rules(2)} }}\n"


def text(x, y, content, *classes):
    return f'<text x="{x:g}" y="{y:g}" class="{" ".join(classes)}">{escape(content)}</text>'


def bar(x, y, width, kind, title):
    return (f'<rect x="{x:g}" y="{y:g}" width="{max(width, 1):.1f}" height="{BAR}" rx="2" '
            f'class="{kind}"><title>{escape(title)}</title></rect>')


def milliseconds(microseconds):
    value = microseconds / 1000
    return f"{value:.0f} ms" if value >= 1000 else f"{value:.3g} ms"


def ratio_limit(result, run):
    """What the ratio to the base must not exceed, or None."""
    return next((limit["most"] for limit in result["limits"]
                 if limit["run"] == run and limit["of"] == result["base"]), None)


def draw_run(result, run, scale, y):
    entry = result["summary"][run]
    width = BAR_WIDTH * entry["ratio"] / scale
    label = f"{entry['ratio']:.2f}×, {milliseconds(entry['total_us'])}"
    parts = [text(LABEL_X, y + 13, run), bar(BAR_X, y, width, "ours", f"{run}: {label}")]
    limit = ratio_limit(result, run)
    if limit is not None:
        x = BAR_X + BAR_WIDTH * limit / scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 3}" y2="{y + BAR + 3}" '
                     f'class="limit"><title>limit {limit:g}×</title></line>')
        width = max(width, BAR_WIDTH * limit / scale)
    parts.append(text(BAR_X + width + 8, y + 13, label))
    fraction = entry["floor_fraction"]
    parts += [f'<rect x="{FLOOR_X}" y="{y}" width="{FLOOR_WIDTH}" height="{BAR}" rx="2" '
              'class="track line"/>',
              bar(FLOOR_X, y, FLOOR_WIDTH * min(fraction, 1), "floor",
                  f"floor {milliseconds(entry['floor_us'])}"),
              text(FLOOR_X - 8, y + 13, f"{100 * fraction:.0f} %", "end")]
    return parts


def draw_case(result, y):
    """The elements of one case that starts at y, and where it ends."""
    base = result["base"]
    parts = [text(LABEL_X, y + 14, result["title"], "case"),
             text(WIDTH - 40, y + 14, result["shape"], "soft", "end")]
    y += ROW
    ours = [run for run, entry in result["summary"].items() if "floor_fraction" in entry]
    scale = max(1.0, *(result["summary"][run]["ratio"] for run in ours))
    for run in ours:
        parts += draw_run(result, run, scale, y)
        y += ROW
    time = milliseconds(result["summary"][base]["total_us"])
    parts += [text(LABEL_X, y + 13, base), bar(BAR_X, y, BAR_WIDTH / scale, "mpi", f"{base}: {time}"),
              text(BAR_X + BAR_WIDTH / scale + 8, y + 13, time)]
    y += ROW
    parts.append(f'<line x1="{LABEL_X}" x2="{WIDTH - 40}" y1="{y + 4}" y2="{y + 4}" class="line"/>')
    return parts, y + 18


def draw(folder, names):
    """Draws the cases of `names` that have results and a base; the picture's path, or None."""
    results = [json.loads((folder / f"{name}.json").read_text())
               for name in names if (folder / f"{name}.json").exists()]
    results = [result for result in results if result["base"] == "MPI"]
    if not results:
        return None
    about = results[-1]["machine"]
    parts = [
        text(LABEL_X, 40, "Plan + dispatch + combine, ranks as processes of one machine", "title"),
        text(LABEL_X, 64, f"{about['cores']} cores of {about['cpu']}, {about['compiler']}, "
             f"{about.get('mpi', 'MPI')}; bf16, identity experts, not counted", "soft"),
        text(BAR_X, 100, "time relative to MPI_Alltoallv, one copy per destination rank "
             "(median; red: the limit)", "soft"),
        text(FLOOR_X, 100, "of the plain copies' speed", "soft"),
    ]
    y = TOP
    for result in results:
        drawn, y = draw_case(result, y)
        parts += drawn
    body = "\n".join(parts)
    path = folder / "bench.svg"
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" '
        f'viewBox="0 0 {WIDTH} {y}" role="img" aria-label="Wherry compared with MPI">\n'
        f'<style>{style()}</style>\n'
        f'<rect width="{WIDTH}" height="{y}" class="paper"/>\n{body}\n</svg>\n')
    return path
