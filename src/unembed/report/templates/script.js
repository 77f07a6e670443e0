// Draws the figures in the colours of the page, switches theme and scales, saves tables. Loads nothing.
"use strict";
(() => {
  const root = document.documentElement;
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const drawings = read("drawings");
  const plots = [...document.querySelectorAll(".plot")];
  const printed = window.matchMedia("print");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const PRINT_WIDTH = 660;
  let printing = false;

  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  // "@raw" is the colour --raw of the style sheet as it is now, "@raw/0.2" the same with that opacity.
  function colour(name) {
    const [variable, opacity] = name.slice(1).split("/");
    probe.style.color = `var(--${variable})`;
    const found = getComputedStyle(probe).color;
    return opacity ? found.replace("rgb(", "rgba(").replace(")", `, ${opacity})`) : found;
  }
  function painted(part) {
    if (typeof part === "string") return part.startsWith("@") ? colour(part) : part;
    if (Array.isArray(part)) return part.map(painted);
    if (part === null || typeof part !== "object") return part;
    return Object.fromEntries(Object.entries(part).map(([key, value]) => [key, painted(value)]));
  }

  function layout(own, width) {
    const narrow = width < 560;
    const size = narrow ? 12 : 13;
    const family = getComputedStyle(document.body).fontFamily;
    const line = { gridcolor: "@grid", linecolor: "@line", zerolinecolor: "@line", zeroline: false, automargin: true,
      ticks: "outside", tickcolor: "@line", ticklen: 4, exponentformat: "power", minexponent: 4, separatethousands: true,
      nticks: narrow ? 5 : 9 };
    const legend = { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", font: { size }, bgcolor: "rgba(0,0,0,0)" };
    const whole = {
      font: { family, size, color: "@ink" },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: narrow ? 48 : 64, r: 16, t: 34, b: 48 },
      hovermode: "x unified", dragmode: window.matchMedia("(pointer: coarse)").matches ? false : "zoom",
      hoverlabel: { bgcolor: "@panel", bordercolor: "@line", font: { family, color: "@ink", size } },
      modebar: { bgcolor: "@paper", color: "@muted", activecolor: "@ink" },
      width, ...own,
    };
    whole.legend = { ...legend, ...own.legend };
    for (const key of Object.keys(whole)) {
      if (/^[xy]axis\d*$/.test(key)) {
        const title = { standoff: 10, ...whole[key].title, font: { size } };
        whole[key] = { ...line, ...whole[key], title };
        // Plotly writes the base of a power a quarter larger than the font asked for.
        if (typeof whole[key].dtick === "number") whole[key].tickfont = { size: 0.8 * size };
      }
    }
    return painted(whole);
  }
  // Named one by one: Plotly's own list has buttons that lead to its web site.
  const config = { displaylogo: false, responsive: false, scrollZoom: false,
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };

  function draw(plot) {
    const { traces, layout: given, shown = {} } = drawings[plot.dataset.figure];
    const own = { ...given };
    for (const [axis, log] of Object.entries(shown)) if (log) own[axis] = { title: given[axis].title, ...log };
    const width = printing ? PRINT_WIDTH : plot.clientWidth;
    Plotly.react(plot, painted(traces), layout({ ...own, height: plot.clientHeight }, width), config);
  }
  const drawAll = () => { if (plots.length) plots.forEach(draw); };
  drawAll();

  let waiting = 0;
  new ResizeObserver(() => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => { if (!printing) drawAll(); });
  }).observe(document.querySelector("main"));

  for (const button of document.querySelectorAll(".scale")) {
    button.addEventListener("click", () => {
      const { figure, axis } = button.dataset;
      const log = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(log));
      drawings[figure].shown = { ...drawings[figure].shown, [axis]: log ? drawings[figure].log[axis] : null };
      draw(plots[figure]);
    });
  }

  const themes = ["system", "light", "dark"];
  const theme = document.getElementById("theme");
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const shown = theme.querySelector("span");
    const next = themes[(themes.indexOf(shown.textContent) + 1) % themes.length];
    shown.textContent = next;
    if (next === "system") delete root.dataset.theme;
    else root.dataset.theme = next;
    drawAll();
  });
  dark.addEventListener("change", drawAll);

  for (const button of document.querySelectorAll(".csv")) {
    button.addEventListener("click", () => {
      const file = new Blob([read(`table-${button.dataset.table}`)], { type: "text/csv;charset=utf-8" });
      const link = document.createElement("a");
      link.href = URL.createObjectURL(file);
      link.download = button.dataset.file;
      document.body.append(link);
      link.click();
      link.remove();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    });
  }

  // Paper is light and narrow, and has no summary to click on.
  function toPaper() {
    if (printing) return;
    printing = true;
    root.dataset.before = root.dataset.theme || "";
    root.dataset.theme = "light";
    for (const part of document.querySelectorAll("details:not([open])")) {
      part.open = true;
      part.dataset.closed = "";
    }
    drawAll();
  }
  function toScreen() {
    if (!printing) return;
    printing = false;
    if (root.dataset.before) root.dataset.theme = root.dataset.before;
    else delete root.dataset.theme;
    delete root.dataset.before;
    for (const part of document.querySelectorAll("details[data-closed]")) {
      part.open = false;
      delete part.dataset.closed;
    }
    drawAll();
  }
  window.addEventListener("beforeprint", toPaper);
  window.addEventListener("afterprint", toScreen);
  printed.addEventListener("change", (event) => (event.matches ? toPaper() : toScreen()));
})();
