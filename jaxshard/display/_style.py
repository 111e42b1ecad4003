"""The style sheet of all displays, and the class that keeps it to them.

Colours are mixed from the colour of the text around a display, so that they follow the theme of
any notebook, also one that is light on a dark desktop. The class holds a hash of the sheet: saved
outputs of other versions on the same page keep their own.
"""

import hashlib

_SHEET = """
.ROOT{--text:var(--jp-content-font-color1,var(--vscode-editor-foreground,currentColor));
--mono:var(--jp-code-font-family,var(--vscode-editor-font-family,ui-monospace,SFMono-Regular,Menlo,
Consolas,monospace));
--muted:color-mix(in srgb,currentColor 62%,transparent);
--line:color-mix(in srgb,currentColor 15%,transparent);
--soft:color-mix(in srgb,currentColor 5%,transparent);
--blue:color-mix(in oklab,#4c8dd6 88%,currentColor);
--good:color-mix(in oklab,#2da44e 82%,currentColor);
--bad:color-mix(in oklab,#e5484d 85%,currentColor);
--warm:color-mix(in oklab,#c98a1b 85%,currentColor);
--ui:var(--jp-ui-font-family,var(--vscode-font-family,system-ui,sans-serif));
color:var(--text);font:13px/1.45 var(--ui);font-variant-numeric:tabular-nums;
container-type:inline-size;max-width:76em;border:1px solid var(--line);border-radius:6px;
padding:10px 14px;margin:4px 0;text-align:left;box-sizing:border-box}
.ROOT *{box-sizing:border-box}
.ROOT .j-head{display:flex;align-items:baseline;gap:8px;min-width:0}
.ROOT .j-kind{font-weight:600;white-space:nowrap}
.ROOT .j-subject{font-family:var(--mono);font-size:12px;color:var(--muted);overflow:hidden;
text-overflow:ellipsis;white-space:nowrap;min-width:0}
.ROOT .j-badge{margin-left:auto;padding:0 8px;border-radius:9px;border:1px solid var(--line);
font-size:12px;white-space:nowrap}
.ROOT .j-good{color:var(--good);border-color:currentColor}
.ROOT .j-bad{color:var(--bad);border-color:currentColor}
.ROOT .j-facts{display:flex;flex-wrap:wrap;gap:6px 24px;margin:8px 0 0;padding:0}
.ROOT .j-facts>div{min-width:0;max-width:100%}
.ROOT .j-facts :is(dt,dd){display:block;float:none;width:auto;margin:0;padding:0}
.ROOT .j-facts dt{font-weight:400;font-size:11px;color:var(--muted)}
.ROOT .j-facts dd{overflow-wrap:anywhere}
.ROOT .j-mono{font:12px var(--mono)}
.ROOT .j-tree{margin-top:10px;border-top:1px solid var(--line);padding-top:4px}
.ROOT .j-row{display:grid;align-items:baseline;column-gap:14px;padding:1px 4px;border-radius:3px;
grid-template-columns:minmax(0,1fr) var(--shape) var(--dtype) var(--spec) 6.5em 5em;margin:0;
list-style:none;font:12px/20px var(--mono)}
.ROOT .j-row>*{min-width:0;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.ROOT .j-row:hover{background:var(--soft)}
.ROOT .j-titles>*{color:var(--muted);font:11px/20px var(--ui)}
.ROOT .j-titles:hover{background:none}
.ROOT summary{cursor:pointer}
.ROOT summary.j-row::-webkit-details-marker{display:none}
.ROOT .j-tree summary>.j-name::before{content:"\\25b8";display:inline-block;width:1.1em;
color:var(--muted)}
.ROOT .j-tree details[open]>summary>.j-name::before{content:"\\25be"}
.ROOT .j-kids{margin-left:8px;padding-left:9px;border-left:1px solid var(--line)}
.ROOT .j-dtype,.ROOT .j-spec,.ROOT .j-count,.ROOT .j-hint{color:var(--muted)}
.ROOT .j-count,.ROOT .j-hint,.ROOT .j-num{font-family:var(--ui)}
.ROOT .j-num{text-align:right}
.ROOT .j-bar{align-self:center;height:5px;border-radius:3px;background:var(--soft)}
.ROOT .j-bar i{display:block;height:100%;border-radius:3px;background:var(--blue)}
.ROOT .j-more,.ROOT .j-note{color:var(--muted);font-size:12px;padding:1px 4px}
.ROOT .j-note{padding:6px 0 0}
.ROOT .j-fold{margin-top:6px}
.ROOT .j-fold>summary{color:var(--muted);font-size:12px}
.ROOT .j-table.j-table{border-collapse:collapse;margin:8px 0 0;width:100%;font-size:12px;border:0;
table-layout:auto;color:inherit;display:table}
.ROOT .j-table.j-table tr:nth-child(n){background:none}
.ROOT .j-table.j-table tbody tr:nth-child(n):hover{background:var(--soft)}
.ROOT .j-table.j-table :is(th,td){text-align:left;vertical-align:baseline;padding:3px 14px 3px 0;
border:0;border-bottom:1px solid var(--line);background:none;max-width:none;white-space:normal;
overflow-wrap:anywhere}
.ROOT .j-table.j-table th{font-weight:400;font-size:11px;color:var(--muted)}
.ROOT .j-table.j-table td:not(:last-child,.j-num){min-width:9em}
.ROOT .j-table.j-table :is(th,td).j-num{text-align:right;white-space:nowrap}
.ROOT .j-table.j-table tr:last-child td{border-bottom:0}
.ROOT .j-panels{display:flex;flex-wrap:wrap;gap:10px 18px;margin-top:10px}
.ROOT .j-panels figure{margin:0;padding:0}
.ROOT .j-panels figcaption{color:var(--muted);font:11px var(--mono)}
.ROOT svg{display:block;max-width:100%;height:auto;color:inherit}
.ROOT svg text{font:10px var(--mono);fill:currentColor}
.ROOT .j-timeline{margin-top:12px}
.ROOT .j-timeline .j-grid{stroke:var(--line)}
.ROOT .j-timeline .j-kept{stroke:var(--blue);stroke-width:1.6}
.ROOT .j-timeline .j-lost{stroke:var(--bad);stroke-width:1.6}
.ROOT .j-timeline .j-restoring{stroke:var(--muted);stroke-width:1.2;stroke-dasharray:2 2}
.ROOT .j-timeline .j-save{fill:var(--blue)}
.ROOT .j-timeline text{fill:var(--muted)}
.ROOT .j-timeline .j-failed{fill:var(--bad);font:600 13px var(--ui)}
.ROOT .j-parts{display:flex;height:9px;border-radius:4px;overflow:hidden;margin-top:10px;
background:var(--soft)}
.ROOT .j-parts i{display:block;height:100%;min-width:1px}
.ROOT .j-keys{display:flex;flex-wrap:wrap;gap:2px 16px;margin-top:5px;font-size:12px}
.ROOT .j-keys i{display:inline-block;width:8px;height:8px;border-radius:2px}
.ROOT .j-part-useful{background:var(--good)}
.ROOT .j-part-saving{background:var(--blue)}
.ROOT .j-part-lost{background:var(--bad)}
.ROOT .j-part-restoring{background:var(--warm)}
.ROOT .j-part-down{background:var(--muted)}
@container (max-width:640px){
.ROOT .j-row{grid-template-columns:minmax(0,6fr) minmax(0,5fr) minmax(0,3fr) 5.5em 3em;
column-gap:10px}
.ROOT .j-row>.j-name{grid-column:1/4}
.ROOT summary.j-row>.j-name{grid-column:1/3}
.ROOT .j-row>.j-num{grid-column:4}
.ROOT .j-row>.j-bar{grid-column:5}
.ROOT .j-row>.j-shape{grid-row:2;grid-column:1;padding-left:1.1em}
.ROOT .j-row>.j-dtype{grid-row:2;grid-column:2}
.ROOT .j-row>.j-spec{grid-row:2;grid-column:3/6}
.ROOT summary.j-row>.j-count{grid-row:1;grid-column:3;text-align:right}
.ROOT .j-row>:empty:not(.j-bar),.ROOT .j-titles{display:none}
}
"""
ROOT = f"jaxshard-{hashlib.sha256(_SHEET.encode()).hexdigest()[:8]}"
CSS = _SHEET.replace(",\n", ",").replace("\n", "").replace("ROOT", ROOT)
