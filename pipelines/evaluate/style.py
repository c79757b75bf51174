"""The style sheet of report.html: light and dark, wide and narrow."""

from __future__ import annotations

CSS = """
:root { color-scheme: light dark;
  --page: #ffffff; --ink: #1c1e21; --soft: #5c6370; --line: #e3e5e8; --panel: #f6f7f9; --accent: #0072b2;
  --right: #00795a; --wrong: #b94a00; --even: #5c6370; }
@media (prefers-color-scheme: dark) { :root {
  --page: #1b1b1b; --ink: #e8e8e8; --soft: #a2a8b2; --line: #35383d; --panel: #242629; --accent: #5ab4ea;
  --right: #35c79a; --wrong: #f08a4b; --even: #9aa0aa; }
  figure img { filter: invert(.92) hue-rotate(180deg) brightness(1.3); } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 66rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; -webkit-text-size-adjust: 100%; }
h1 { font-size: 1.75rem; line-height: 1.25; margin: .25rem 0 .5rem; max-width: 46rem; letter-spacing: -.01em; }
h2 { font-size: 1.2rem; margin: 3rem 0 .25rem; padding-top: 1rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0 1rem; max-width: 46rem; }
.kicker, .note, caption, .of, .key { color: var(--soft); }
.kicker { font-size: .85rem; font-weight: 600; letter-spacing: .04em; text-transform: uppercase; margin: 0; }
.note { font-size: .9rem; }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; margin: 1.25rem 0 0; font-size: .9rem; }
a { color: var(--accent); text-decoration: none; } a:hover { text-decoration: underline; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .75rem; margin: 1.5rem 0 0; }
.tile { background: var(--panel); border-radius: .5rem; padding: .8rem 1rem; }
.tile b { display: block; font-size: 1.6rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.tile b small { font-size: .9rem; font-weight: 400; color: var(--soft); }
.tile span { color: var(--soft); font-size: .85rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
figure { margin: 1.25rem 0; overflow-x: auto; }
figure img { display: block; width: 100%; min-width: 38rem; max-width: 60rem; height: auto; }
figcaption { position: sticky; left: 0; color: var(--soft); font-size: .9rem; max-width: 46rem; margin-top: .35rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .4rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child, .left { text-align: left; }
tbody th { font-weight: 600; position: sticky; left: 0; background: var(--page); }
td small { color: var(--soft); font-size: .8rem; }
.heat td { background: color-mix(in srgb, var(--accent) calc(var(--share) * 42%), transparent);
  border: 2px solid var(--page); line-height: 1.25; }
.heat td small { display: block; color: inherit; opacity: .7; font-size: .75rem; }
.heat .level th { font-weight: 400; padding-left: 1.4rem; }
.higher { color: var(--right); } .lower { color: var(--wrong); } .even { color: var(--even); }
svg.interval { display: block; margin-left: auto; width: 11rem; height: 1.1rem; }
svg.interval line { stroke: currentColor; stroke-width: 3; stroke-linecap: round; }
svg.interval line.zero { stroke: var(--soft); stroke-width: 1; opacity: .6; }
svg.interval circle { fill: currentColor; }
article { border: 1px solid var(--line); border-radius: .5rem; margin: 0 0 1rem; overflow: hidden; }
article header { display: flex; flex-wrap: wrap; gap: .25rem .8rem; align-items: baseline; padding: .6rem .8rem;
  background: var(--panel); }
.badge { font-size: .75rem; color: var(--soft); border: 1px solid var(--line); border-radius: 1rem; padding: 0 .5rem; }
.prompt { flex: 1 1 18rem; min-width: 0; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 16rem;
  overflow-y: auto; unicode-bidi: isolate; }
.key { font-size: .9rem; overflow-wrap: anywhere; } .key b { color: var(--ink); }
.cards { display: flex; flex-wrap: wrap; gap: 1px; background: var(--line); }
.card { flex: 1 1 10.5rem; background: var(--page); padding: .6rem .8rem; min-width: 0; }
.card h4 { margin: 0 0 .4rem; font-size: .9rem; }
.of { font-weight: 400; font-size: .8rem; margin-left: .25rem; }
.completion { border-left: 3px solid var(--wrong); padding-left: .55rem; margin: .35rem 0 .6rem; }
.completion.right { border-color: var(--right); }
.completion p { margin: 0; font-size: .75rem; color: var(--soft); }
.completion .mark { color: var(--wrong); font-size: .9rem; } .completion.right .mark { color: var(--right); }
.completion pre { margin: .15rem 0 0; font: .8rem/1.45 ui-monospace, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; max-height: 14rem; overflow-y: auto; unicode-bidi: isolate; }
.thought { color: var(--soft); } .answer { font-weight: 700; }
summary { cursor: pointer; font-size: .8rem; color: var(--accent); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.2rem; font-size: .9rem; max-width: 52rem; }
dt { font-weight: 600; } dd { margin: 0; color: var(--soft); }
@media (max-width: 34rem) { body { padding: 1.25rem .9rem 3rem; } h1 { font-size: 1.35rem; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .6rem; }
  th, td { padding: .35rem .45rem; } }
@media print { .scroll, figure { overflow: visible; }
  figure img { min-width: 0; } .completion pre { max-height: none } }
"""
