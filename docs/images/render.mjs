// Draws every .mmd of this folder: npm install --no-save beautiful-mermaid@1.1.3 && node docs/images/render.mjs
// Colours are computed here, since viewers that are not browsers know neither CSS variables nor color-mix.
import fs from "node:fs";
import path from "node:path";
import { renderMermaidSVG } from "beautiful-mermaid";

const background = "#ffffff";
const ink = "#27272a";

function mixed(share) {
  const channel = (at) =>
    Math.round(parseInt(ink.slice(at, at + 2), 16) * share + parseInt(background.slice(at, at + 2), 16) * (1 - share));
  return "#" + [1, 3, 5].map((at) => channel(at).toString(16).padStart(2, "0")).join("");
}

const colours = {
  "--bg": background,
  "--fg": ink,
  "--_text": ink,
  "--_text-sec": mixed(0.8),
  "--_text-muted": mixed(0.8),
  "--_text-faint": mixed(0.5),
  "--_line": mixed(0.5),
  "--_arrow": mixed(0.85),
  "--_node-fill": mixed(0.05),
  "--_node-stroke": mixed(0.3),
  "--_group-fill": background,
  "--_group-hdr": mixed(0.1),
  "--_inner-stroke": mixed(0.12),
  "--_key-badge": mixed(0.1),
};
// A rim in the colour of the paper keeps words readable where a line crosses them.
const text = `text { font-family: Helvetica, Arial, "DejaVu Sans", sans-serif; paint-order: stroke; stroke: ${background};
    stroke-width: 3px; stroke-linejoin: round; }`;

const folder = import.meta.dirname;
for (const name of fs.readdirSync(folder).filter((name) => name.endsWith(".mmd"))) {
  const source = fs.readFileSync(path.join(folder, name), "utf8");
  const svg = renderMermaidSVG(source, { bg: background, fg: ink, font: "Arial" })
    .replace(/<style>[\s\S]*?<\/style>/, `<style>\n  ${text}\n</style>`)
    .replace(/ style="--bg[^"]*"/, ` style="background:${background}"`)
    .replace(/var\((--[\w-]+)\)/g, (whole, variable) => colours[variable] ?? whole);
  if (svg.includes("var(")) throw new Error(`${name}: a colour that is not in the list`);
  fs.writeFileSync(path.join(folder, name.replace(".mmd", ".svg")), svg);
}
