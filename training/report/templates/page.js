
"use strict";
// One cursor for all charts: what the pointer (or an arrow key) reads in one is marked in the others.
(() => {
  const charts = [...document.querySelectorAll("[data-chart]")].map((figure) => ({
    figure,
    plot: figure.querySelector(".plot"),
    box: figure.querySelector(".box"),
    cursor: figure.querySelector(".cursor"),
    readout: figure.querySelector(".readout"),
    data: JSON.parse(figure.querySelector("script").textContent),
  }));

  const nearest = (places, place) => {
    let low = 0, high = places.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (places[middle] < place) low = middle; else high = middle;
    }
    return place - places[low] <= places[high] - place ? low : high;
  };

  const element = (name, className, text) => {
    const made = document.createElement(name);
    made.className = className;
    made.textContent = text;
    return made;
  };

  const show = (active, index) => {
    for (const chart of charts) {
      const place = 100 * chart.data.places[index] + "%";
      chart.cursor.setAttribute("x1", place);
      chart.cursor.setAttribute("x2", place);
      chart.cursor.classList.add("on");
      if (chart !== active) chart.readout.classList.remove("on");
    }
    active.index = index;
    const { readout, data, box, plot } = active;
    readout.replaceChildren(element("b", "", data.labels[index]));
    for (const row of data.rows) {
      if (!row.values[index]) continue;
      const line = element("div", "", "");
      line.append(element("i", "swatch " + row.tone, ""), element("span", "", row.name), element("span", "", row.values[index]));
      readout.append(line);
    }
    readout.classList.add("on");
    const frame = plot.getBoundingClientRect(), area = box.getBoundingClientRect();
    const x = area.left - frame.left + data.places[index] * area.width;
    const width = readout.offsetWidth;
    const left = x + 14 + width <= frame.width ? x + 14 : x - 14 - width;
    readout.style.left = Math.max(0, Math.min(left, frame.width - width)) + "px";
  };

  const hide = () => {
    for (const { cursor, readout } of charts) {
      cursor.classList.remove("on");
      readout.classList.remove("on");
    }
  };

  for (const chart of charts) {
    const last = chart.data.places.length - 1;
    const follow = (event) => {
      const area = chart.box.getBoundingClientRect();
      show(chart, nearest(chart.data.places, (event.clientX - area.left) / area.width));
    };
    chart.plot.addEventListener("pointermove", follow);
    chart.plot.addEventListener("pointerdown", follow);
    chart.plot.addEventListener("pointerleave", hide);
    chart.plot.addEventListener("blur", hide);
    chart.plot.addEventListener("keydown", (event) => {
      const index = chart.index ?? last;
      const moved = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: last }[event.key];
      if (event.key === "Escape") hide();
      if (moved === undefined) return;
      event.preventDefault();
      show(chart, Math.max(0, Math.min(last, moved)));
    });
  }

  addEventListener("beforeprint", () => {
    hide();
    for (const details of document.querySelectorAll("details:not([open])")) {
      details.open = true;
      details.dataset.closed = "";
    }
  });
  addEventListener("afterprint", () => {
    for (const details of document.querySelectorAll("details[data-closed]")) {
      details.open = false;
      delete details.dataset.closed;
    }
  });
})();
