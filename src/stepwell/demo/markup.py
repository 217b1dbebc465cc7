"""Write HTML: the style of a report, and the parts that its sections are made of. Well-formed XML too.

Colours of tiers are the same everywhere, chosen to be told apart by who sees few colours and to stand out from the
paper in light and dark; marks and labels say the same once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from stepwell.demo.charts import escape, outline

SHAPE = {"device": "octagon", "host": "square", "shared": "triangle", "disk": "diamond", "computed": "cross"}
"""The mark of each source: the tiers, and what is computed."""

STYLE = (
    """
:root{color-scheme:light dark;--paper:#fff;--raised:#f6f7f9;--ink:#1a1d21;--quiet:#565c66;--rule:#d9dde3;--grid:#e7eaee;
--shade:#0003;
--good:#12703f;--bad:#b3261e;--device:#0a4a86;--host:#2f8fc4;--shared:#b86e00;--disk:#a2307a;--computed:#7b8089;
--model:#1a1d21;--on-device:#fff;--on-host:#000;--on-shared:#000;--on-disk:#fff;--on-computed:#000;--nowhere:#c9ced6;
--on-nowhere:#000;--phase-start:#b4bac4;--phase-compile:#d3d8df;--phase-serve:#2e7d5b;--phase-after:#e3e6eb}
@media (prefers-color-scheme:dark){:root{--paper:#14171b;--raised:#1d2126;--ink:#e8eaed;--quiet:#a6adb8;--rule:#363c45;
--shade:#fff3;--grid:#2a2f37;--good:#5fcf97;--bad:#ff8a80;--device:#4d95e0;--host:#9ad6f7;--shared:#f0a93f;--disk:#e483bb;
--computed:#8b929d;--model:#e8eaed;--on-device:#000;--on-host:#000;--on-shared:#000;--on-disk:#000;--on-computed:#000;
--nowhere:#4a515c;--on-nowhere:#fff;--phase-start:#6b7380;--phase-compile:#4c535e;--phase-serve:#46b285;
--phase-after:#343a43}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1080px;padding:28px 24px 64px;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 4px}h2{font-size:1.25rem;margin:52px 0 8px;padding-top:14px;
border-top:1px solid var(--rule)}h3{font-size:1rem;margin:26px 0 6px}p{max-width:74ch;margin:8px 0}
.quiet,figcaption,caption{color:var(--quiet);font-size:.875rem}
.verdict{font-weight:650}.good{color:var(--good)}.bad{color:var(--bad)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(158px,1fr));gap:12px;margin:20px 0;padding:0;
list-style:none}.card{background:var(--raised);border:1px solid var(--rule);border-radius:8px;padding:12px 14px}
.card b{display:block;font-size:1.35rem;line-height:1.3;font-variant-numeric:tabular-nums}
.card span{color:var(--quiet);font-size:.875rem;line-height:1.35;display:block}
figure{margin:14px 0 6px}.scroll,.wide{overflow-x:auto;
background:linear-gradient(90deg,var(--paper) 50%,transparent) 0 0/36px
100% no-repeat local,linear-gradient(270deg,var(--paper) 50%,transparent) 100% 0/36px 100% no-repeat local,
linear-gradient(90deg,var(--shade),transparent) 0 0/14px 100% no-repeat scroll,
linear-gradient(270deg,var(--shade),transparent) 100% 0/14px 100% no-repeat scroll}
svg.chart{display:block;width:100%;min-width:740px;height:auto}
svg text{font:12.5px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;fill:var(--ink)}
svg .tick{fill:var(--quiet);font-variant-numeric:tabular-nums}svg .act{font-weight:650;fill:var(--quiet)}
.axis{stroke:var(--quiet)}.grid{stroke:var(--grid)}.band{fill:none}.band.odd{fill:var(--raised)}
.event{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:5 3}svg .event-label{fill:var(--bad);font-weight:600}
svg .halo,svg .event-label{paint-order:stroke;stroke:var(--paper);stroke-width:5px;stroke-linejoin:round}
.paper{fill:var(--paper)}.hit{fill:var(--ink);stroke:var(--paper);stroke-width:1.5}.cell{stroke:var(--paper);stroke-width:.7}
.part{stroke:var(--paper)}.dot{stroke:var(--paper);stroke-width:.8}.faint{fill-opacity:.8}
.stroke-model{fill:none;stroke:var(--model);stroke-width:2;stroke-dasharray:3 4}
.key{display:flex;flex-wrap:wrap;gap:4px 18px;margin:6px 0;padding:0;list-style:none;font-size:.875rem}
.key svg{width:16px;height:16px;vertical-align:-3px;margin-right:5px}
ol.acts{display:flex;flex-wrap:wrap;gap:2px 26px;margin:6px 0;padding-left:1.2em;font-size:.875rem}
ol.acts li{margin-right:12px}
ul{padding-left:1.2em}tbody th{white-space:nowrap}tbody th.said{white-space:normal;min-width:6ch}
table{border-collapse:collapse;font-size:.875rem;margin:8px 0;font-variant-numeric:tabular-nums}
caption{text-align:left;padding:4px 0}th,td{padding:4px 12px 4px 0;border-bottom:1px solid var(--rule);text-align:left;
vertical-align:top}th{font-weight:600}.n{text-align:right;white-space:nowrap}
.said{overflow-wrap:anywhere}td.said{min-width:16ch}
details{margin:8px 0}summary{cursor:pointer;color:var(--quiet);font-size:.875rem}
code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.85em;overflow-wrap:anywhere}
@media screen and (max-width:788px){.scroll::before{content:"sideways: the rest of the chart →";position:sticky;left:0;
display:block;width:max-content;color:var(--quiet);font-size:.8rem}}
@media (max-width:600px){body{padding:18px 14px 48px}h1{font-size:1.3rem}.cards{grid-template-columns:1fr 1fr}
.card b{font-size:1.1rem}}
@media print{:root{color-scheme:light}body{max-width:none;padding:0;font-size:10pt}figure,.card,tr{break-inside:avoid}
h2,h3,caption{break-after:avoid}h2{margin-top:26px}table{font-size:8pt}th,td{padding-right:8px}
.scroll,.wide{overflow:visible;background:none}svg.chart{min-width:0}summary{display:none}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""
    + "".join(
        f".fill-{name}{{fill:var(--{name})}}svg .on-{name}{{fill:var(--on-{name})}}"
        f".stroke-{name}{{fill:none;stroke:var(--{name});stroke-width:2}}"
        for name in (*SHAPE, "nowhere")
    )
    + "".join(f".phase-{name}{{fill:var(--phase-{name})}}" for name in ("start", "compile", "serve", "after"))
)

POLICY = "default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]], *, words: int = 1) -> str:
    """Return a table; the first `words` columns are words, the rest numbers, and the first names its row."""
    kinds = ["" if number < words else ' class="n"' for number in range(len(head))]
    top = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(head, kinds, strict=True))
    lines = []
    for row in rows:
        cells = [f"<td{kind}>{escape(value)}</td>" for value, kind in zip(row[1:], kinds[1:], strict=True)]
        lines.append(f'<tr><th scope="row">{escape(row[0])}</th>{"".join(cells)}</tr>')
    return (
        f'<div class="wide"><table><caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def behind(summary: str, inner: str) -> str:
    """Return what is shown when asked for."""
    return f"<details><summary>{escape(summary)}</summary>{inner}</details>"


def figure(drawing: str, caption: str = "") -> str:
    """Return a chart with what is to be said below it."""
    return f"<figure>{drawing}{f'<figcaption>{escape(caption)}</figcaption>' if caption else ''}</figure>"


def section(name: str, title: str, *parts: str) -> str:
    """Return a section with its heading; name: its id."""
    heading = f'<h2 id="{name}-h">{escape(title)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-h">{heading}{"".join(parts)}</section>'


def paragraph(words: str, kind: str = "") -> str:
    """Return a paragraph of text."""
    opening = f'<p class="{kind}">' if kind else "<p>"
    return f"{opening}{escape(words)}</p>"


def key(names: Mapping[str, str], *, shapes: Mapping[str, str] | None = None, what: str = "colours") -> str:
    """Return what the colours of a chart mean: class -> words. shapes: class -> mark."""
    items = []
    for kind, words in names.items():
        path = outline((shapes or {}).get(kind, "square"), 8, 8, 6)
        swatch = f'<svg viewBox="0 0 16 16" aria-hidden="true"><path class="{kind}" d="{path}"/></svg>'
        items.append(f"<li>{swatch}{escape(words)}</li>")
    return f'<ul class="key" aria-label="{what}">{"".join(items)}</ul>'


def fills(*sources: str) -> dict[str, str]:
    """Return the classes of some sources, for key()."""
    return {f"fill-{source}": source for source in sources}


MARKS = {f"fill-{source}": shape for source, shape in SHAPE.items()}
