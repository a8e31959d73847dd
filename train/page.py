"""The page of a report: one HTML file that loads nothing, in light and dark. Everything in it is escaped by jinja2."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, StrictUndefined

MARK = '<meta name="generator" content="headway report">'
"""By which a report is told from a file of the user's."""


def render(**content: Any) -> str:
    """Return the page. What is not Markup comes out as text, whatever it holds."""
    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(PAGE).render(**content)


PAGE = (
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
"""
    + MARK
    + """
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ title }}</title>
<style>
:root { --back: #ffffff; --text: #1c1f24; --dim: #5f6772; --rule: #dfe3e8; --mark: #fff3cd;
  --c0: #1769aa; --c1: #c2410c; --c2: #15803d; --c3: #7e22ce; --c4: #b45309; --c5: #0e7490; --c6: #be185d; --c7: #4d5763; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14171c; --text: #e4e7eb; --dim: #98a1ad; --rule: #2d333c; --mark: #3d3413;
    --c0: #6cb6ff; --c1: #ff9a62; --c2: #6fdc8c; --c3: #cf9bff; --c4: #f0c050; --c5: #5fd4e6; --c6: #ff8bbd; --c7: #aab4c0; } }
body { background: var(--back); color: var(--text); font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1360px;
  padding: 1.2rem; }
h1 { font-size: 1.4rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
h3 { font-size: .95rem; margin: 0 0 .2rem; }
p { margin: .3rem 0; } .dim { color: var(--dim); } code, .words { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 1.2rem; }
figure { margin: 0; } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--dim); font: 11px system-ui, sans-serif; } svg .name { fill: var(--text); font-size: 12px; }
svg .across { text-anchor: middle; } svg .up { text-anchor: end; } svg .grid { stroke: var(--rule); }
svg .curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; } svg .faint { opacity: .3; stroke-width: 1; }
svg .thin { stroke-width: 1; } svg .dashed { stroke-dasharray: 5 3; }
{% for i in range(8) %}
svg .c{{ i }} { stroke: var(--c{{ i }}); } svg .dot.c{{ i }} { fill: var(--c{{ i }}); }
{% endfor %}
table { border-collapse: collapse; font-size: 14px; } .wide { overflow-x: auto; margin: .4rem 0 1.2rem; }
caption { text-align: left; color: var(--dim); padding-bottom: .2rem; }
th, td { text-align: right; padding: .2rem .7rem .2rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th:first-child, td:first-child, .left td { text-align: left; } th { font-weight: 600; }
td, caption { overflow-wrap: anywhere; }
.differs td { background: var(--mark); }
details { margin: .5rem 0; } summary { cursor: pointer; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for run in runs %}
<p><span class="words">{{ run.name }}</span>: {{ run.state }}<br><span class="dim">{{ run.what }}</span></p>
{% endfor %}
<p class="dim">written {{ written }} by headway {{ version }}{% if by != "steps" %}; curves along {{ by }}{% endif %}</p>

{% if wary %}
<h2>Worth knowing</h2>
<ul>
{% for name, line in wary %}
<li>{% if several %}<span class="words">{{ name }}</span>: {% endif %}{{ line }}</li>
{% endfor %}
</ul>
{% endif %}

<h2>Curves</h2>
{% if not charts %}<p>No figures are logged yet.</p>{% endif %}
<div class="charts">
{% for name, note, svg in charts %}
<figure><h3>{{ name }}</h3>{{ svg }}{% if note %}<figcaption class="dim">{{ note }}</figcaption>{% endif %}</figure>
{% endfor %}
</div>

{% macro table_of(table, style="") %}
<div class="wide"><table{% if style %} class="{{ style }}"{% endif %}>
{% if table.title %}<caption>{{ table.title }}</caption>{% endif %}
{% if table.heading|join %}<thead><tr>{% for cell in table.heading %}<th>{{ cell }}</th>{% endfor %}</tr></thead>{% endif %}
<tbody>
{% for row in table.rows %}
<tr{% if style and row[1:]|unique|list|length > 1 %} class="differs"{% endif %}>
{%- for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table>
{% if table.note %}<p class="words dim">{{ table.note }}</p>{% endif %}
</div>
{% endmacro %}

<h2>Last values</h2>
{{ table_of(last) }}

{% if beside %}
<h2>Reports beside the head</h2>
{% for table in beside %}{{ table_of(table) }}{% endfor %}
{% endif %}
{% if unknown %}<p class="dim">not shown, no report that is known: {{ unknown|join(", ") }}</p>{% endif %}

<h2>Recipe</h2>
{% if several %}<p class="dim">Marked: where the runs differ.</p>{% endif %}
{{ table_of(recipe, "left") }}

<h2>Provenance</h2>
{% for name, entries in provenance %}
<details{% if not several %} open{% endif %}><summary class="words">{{ name }}</summary>{{ table_of(entries, "left") }}</details>
{% endfor %}

<h2>Data</h2>
{% for name, entries in data %}
<details{% if not several %} open{% endif %}><summary class="words">{{ name }}</summary>{{ table_of(entries, "left") }}</details>
{% endfor %}
</body>
</html>
"""
)
