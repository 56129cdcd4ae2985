"""The report page's style sheet: light and dark, wide and narrow."""

CSS = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--soft:#59636e;--rule:#d5dae0;--card:#f6f8fa;--bad:#b3261e;
--c0:#0b62d6;--c1:#c7374a;--c2:#00806b;--c3:#a85600;--c4:#7a3fc0;--c5:#5b6470;--c6:#a8005c;--c7:#3d7a00}
@media (prefers-color-scheme:dark){:root{--bg:#0e1116;--fg:#e8ecf1;--soft:#a3adb8;--rule:#333b45;--card:#171c23;
--bad:#ff8a80;--c0:#6fb1ff;--c1:#ff8a94;--c2:#4fd1b5;--c3:#ffb454;--c4:#c79bff;--c5:#aab4c0;--c6:#ff7ec4;--c7:#a5d65a}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:76rem;padding:1.5rem 1rem 4rem;background:var(--bg);color:var(--fg);
font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.7rem;line-height:1.2;margin:0 0 .3rem}
h2{font-size:1.2rem;margin:2.2rem 0 .6rem}
p{margin:.4rem 0;max-width:46rem;color:var(--soft)}
header p{color:var(--fg)}
.partial{color:var(--bad)}
dl{margin:1rem 0 0;padding:.8rem 1rem;background:var(--card);border-radius:.5rem}
dl div{display:grid;grid-template-columns:8rem 1fr;gap:.2rem 1rem;padding:.15rem 0}
dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere}
code{font:.92em ui-monospace,monospace}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,30rem),1fr));gap:1rem}
figure{margin:0;padding:.8rem;background:var(--card);border-radius:.5rem;min-width:0;max-width:44rem}
figcaption{font-weight:600;margin-bottom:.4rem}
figure>svg{display:block;width:100%;height:auto}
text{fill:var(--soft);font:12.5px system-ui,sans-serif}
.grid{stroke:var(--rule);stroke-width:1}
.line{fill:none;stroke-width:2.2;stroke-linejoin:round}
.keys{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;margin:.5rem 0 0;padding:0;font-size:.9rem}
.keys svg{width:28px;height:8px;margin-right:.45rem}
.wide{overflow-x:auto;border:1px solid var(--rule);border-radius:.5rem}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.4rem .7rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--rule)}
tbody tr:last-child>*{border-bottom:0}
th{font-weight:500}
th:first-child{text-align:left;position:sticky;left:0;background:var(--bg)}
thead th{color:var(--soft)}
.bad td,.bad th{color:var(--bad)}
ul{padding-left:1.2rem;overflow-wrap:anywhere}
@media (max-width:40rem){body{padding:1rem .7rem 3rem}dl div{grid-template-columns:1fr}dt{font-size:.85rem}
figure{padding:.6rem}text{font-size:15px}th:first-child{white-space:normal;min-width:9.5rem}th,td{padding:.35rem .5rem}}
""" + "".join(f".s{n}{{stroke:var(--c{n})}}.dot.s{n}{{fill:var(--c{n})}}" for n in range(8))
