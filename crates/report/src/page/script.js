"use strict";
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const DASHES = ["", "6 4", "2 3", "8 3 2 3", "1 3", "10 4"];
  // What is zoomed and where the cursor is, by chart, so that news does not lose it.
  const views = new Map();

  const element = (name, attributes, text) => {
    const made = document.createElementNS(NS, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const html = (name, attributes, text) => {
    const made = document.createElement(name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    return made;
  };

  const number = (value) => {
    const size = Math.abs(value);
    if (size >= 1e6) return (value / 1e6).toPrecision(4) + " M";
    if (size >= 1e4) return (value / 1e3).toPrecision(4) + " k";
    if (size !== 0 && size < 1e-3) return value.toExponential(2);
    return String(+value.toPrecision(5));
  };
  const bytes = (value) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let power = 0;
    while (Math.abs(value) >= 1024 && power < units.length - 1) { value /= 1024; power += 1; }
    return (power === 0 ? value.toFixed(0) : value.toFixed(value >= 100 ? 1 : 2)) + " " + units[power];
  };
  const span = (value) => {
    if (value < 120) return number(value) + " s";
    if (value < 7200) return (value / 60).toFixed(1) + " min";
    return (value / 3600).toFixed(1) + " h";
  };
  const FORMATS = { number, bytes, seconds: span, percent: (value) => number(value) + " %" };

  const ticks = (low, high, most, unit) => {
    const rough = (high - low) / most;
    if (!(rough > 0)) return [low];
    let step;
    if (unit === "bytes") {
      step = 1;
      while (step < rough) step *= 2;
    } else {
      const power = 10 ** Math.floor(Math.log10(rough));
      step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough * (1 - 1e-9));
    }
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(at);
    return found;
  };

  const pattern = (id, index) => {
    const made = element("pattern", { id, width: 8, height: 8, patternUnits: "userSpaceOnUse" });
    const ink = `var(--c${index % 10})`;
    made.append(element("rect", { width: 8, height: 8, fill: ink, "fill-opacity": 0.72 }));
    const marks = ["", "M0 8L8 0", "M0 0L8 8", "M0 4H8", "M4 0V8", "M0 0L8 8M0 8L8 0", "M2 2h2v2h-2z", "M0 2H8M0 6H8", "M2 0V8M6 0V8", "M4 4h1"];
    const path = marks[index % marks.length];
    if (path) made.append(element("path", { d: path, stroke: "var(--card)", "stroke-width": 1.2, fill: "none", opacity: 0.75 }));
    return made;
  };

  const draw = (figure) => {
    const source = figure.querySelector("script");
    if (!source) return;
    const chart = JSON.parse(source.textContent);
    const series = chart.series.filter((one) => one.points.length);
    figure.querySelectorAll("svg,.tools,.legend,.readout").forEach((old) => old.remove());
    if (!series.length) {
      figure.append(html("p", { class: "readout" }, "nothing is recorded yet"));
      return;
    }
    const all = series.flatMap((one) => one.points.map((point) => point[0]));
    let whole = [all.reduce((a, b) => Math.min(a, b)), all.reduce((a, b) => Math.max(a, b))];
    if (whole[0] === whole[1]) whole = [whole[0] - 0.5, whole[1] + 0.5];
    const view = views.get(figure.id) || { range: null, at: null };
    views.set(figure.id, view);
    const range = view.range || whole;
    const fx = FORMATS[chart.xunit], fy = FORMATS[chart.yunit];

    const width = Math.max(280, figure.clientWidth - 24);
    const height = width < 500 ? 240 : 320;
    const margin = { left: chart.yunit === "bytes" ? 72 : 58, right: 12, top: 14, bottom: 34 };
    const inner = { width: width - margin.left - margin.right, height: height - margin.top - margin.bottom };
    const inside = (point) => point[0] >= range[0] && point[0] <= range[1];

    // Stacks add up; lines stand for themselves.
    const xs = chart.stack ? series[0].points.map((point) => point[0]) : null;
    let low = Infinity, high = -Infinity;
    if (chart.stack) {
      low = 0;
      xs.forEach((x, place) => {
        if (x < range[0] || x > range[1]) return;
        high = Math.max(high, series.reduce((sum, one) => sum + one.points[place][1], 0));
      });
    } else {
      for (const one of series) for (const point of one.points) if (inside(point)) {
        low = Math.min(low, point[1]);
        high = Math.max(high, point[1]);
      }
    }
    if (!isFinite(low) || !isFinite(high)) { low = 0; high = 1; }
    if (chart.zero) low = Math.min(0, low);
    // A level far above would press the rest flat; it is named in the legend all the same.
    for (const level of chart.levels) if (level.y <= high * 1.6) high = Math.max(high, level.y);
    if (high === low) high = low + 1;
    high += (high - low) * 0.05;
    const x = (value) => margin.left + (value - range[0]) / (range[1] - range[0]) * inner.width;
    const y = (value) => margin.top + (1 - (value - low) / (high - low)) * inner.height;

    const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-hidden": "true" });
    const definitions = element("defs", {});
    const clip = element("clipPath", { id: figure.id + "clip" });
    clip.append(element("rect", { x: margin.left, y: 0, width: inner.width, height: margin.top + inner.height }));
    definitions.append(clip);
    svg.append(definitions);
    for (const at of ticks(low, high, 6, chart.yunit)) {
      svg.append(element("line", { x1: margin.left, x2: width - margin.right, y1: y(at), y2: y(at), stroke: "var(--grid)" }));
      svg.append(element("text", { x: margin.left - 8, y: y(at) + 4, "text-anchor": "end" }, fy(at)));
    }
    for (const at of ticks(range[0], range[1], width < 500 ? 4 : 8, chart.xunit)) {
      svg.append(element("text", { x: x(at), y: height - margin.bottom + 16, "text-anchor": "middle" }, fx(at)));
    }
    svg.append(element("text", { x: width - margin.right, y: height - 4, "text-anchor": "end" }, chart.xname));
    svg.append(element("line", { x1: margin.left, x2: width - margin.right, y1: y(low), y2: y(low), stroke: "var(--muted)" }));
    const curves = element("g", { "clip-path": `url(#${figure.id}clip)` });
    svg.append(curves);

    if (chart.stack) {
      const below = xs.map(() => 0);
      series.forEach((one, index) => {
        const id = `${figure.id}p${index}`;
        definitions.append(pattern(id, index));
        const lower = below.slice();
        one.points.forEach((point, place) => { below[place] += point[1]; });
        const half = xs.length > 1 ? (xs[1] - xs[0]) / 2 : 0.5;
        const step = (edge) => xs.map((at, place) => `${x(at - half).toFixed(1)},${y(edge[place]).toFixed(1)} ${x(at + half).toFixed(1)},${y(edge[place]).toFixed(1)}`);
        const points = step(below).concat(xs.map((at, place) => `${x(at + half).toFixed(1)},${y(lower[place]).toFixed(1)} ${x(at - half).toFixed(1)},${y(lower[place]).toFixed(1)}`).reverse());
        curves.append(element("polygon", { points: points.join(" "), fill: `url(#${id})`, stroke: `var(--c${index % 10})`, "stroke-width": 0.6 }));
      });
    } else {
      series.forEach((one, index) => {
        const points = one.points.map((point) => `${x(point[0]).toFixed(1)},${y(point[1]).toFixed(1)}`);
        const line = { fill: "none", stroke: `var(--c${index % 10})`, "stroke-width": 2, "stroke-dasharray": DASHES[index % DASHES.length] };
        curves.append(element("polyline", { ...line, points: points.join(" ") }));
        if (one.points.length === 1) curves.append(element("circle", { cx: x(one.points[0][0]), cy: y(one.points[0][1]), r: 4, fill: line.stroke }));
      });
    }
    chart.levels.forEach((level) => {
      if (level.y > high) return;
      curves.append(element("line", { x1: margin.left, x2: width - margin.right, y1: y(level.y), y2: y(level.y), stroke: "var(--warn)", "stroke-dasharray": "7 5", "stroke-width": 1.4 }));
      svg.append(element("text", { x: width - margin.right - 4, y: y(level.y) - 4, "text-anchor": "end", style: "fill:var(--warn);font-weight:600" }, `${level.name} ${fy(level.y)}`));
    });
    chart.marks.forEach((mark) => {
      if (mark.x < range[0] || mark.x > range[1]) return;
      const at = x(mark.x), side = at > width * 0.7 ? "end" : "start";
      curves.append(element("line", { x1: at, x2: at, y1: margin.top, y2: y(low), stroke: "var(--text)", "stroke-dasharray": "3 3" }));
      svg.append(element("text", { x: at + (side === "end" ? -5 : 5), y: margin.top + 8, "text-anchor": side, style: "fill:var(--text);font-weight:600" }, mark.name));
    });
    const cursor = element("line", { y1: margin.top, y2: margin.top + inner.height, stroke: "var(--text)", visibility: "hidden" });
    const picked = element("rect", { y: margin.top, height: inner.height, fill: "var(--focus)", "fill-opacity": 0.18, visibility: "hidden" });
    svg.append(picked, cursor);

    const tools = html("div", { class: "tools" });
    const button = (sign, label, act) => {
      const made = html("button", { type: "button", "aria-label": label, title: label }, sign);
      made.addEventListener("click", act);
      tools.append(made);
    };
    const zoom = (factor, around) => {
      const middle = around ?? (view.at ?? (range[0] + range[1]) / 2);
      const next = [middle - (middle - range[0]) * factor, middle + (range[1] - middle) * factor];
      view.range = [Math.max(whole[0], next[0]), Math.min(whole[1], next[1])];
      if (view.range[1] - view.range[0] >= (whole[1] - whole[0]) * 0.999) view.range = null;
      draw(figure);
    };
    const reset = () => { view.range = null; draw(figure); };
    button("+", "zoom in", () => zoom(0.5));
    button("−", "zoom out", () => zoom(2));
    button("all", "show all", reset);

    const legend = html("ul", { class: "legend" });
    const sample = (draws) => {
      const made = element("svg", { width: 26, height: 12, viewBox: "0 0 26 12", style: "width:26px;display:inline-block", "aria-hidden": "true" });
      made.append(draws);
      return made;
    };
    series.forEach((one, index) => {
      const entry = html("li", {});
      entry.append(sample(chart.stack
        ? element("rect", { width: 26, height: 12, fill: `url(#${figure.id}p${index})`, stroke: `var(--c${index % 10})` })
        : element("line", { x1: 0, x2: 26, y1: 6, y2: 6, stroke: `var(--c${index % 10})`, "stroke-width": 2.5, "stroke-dasharray": DASHES[index % DASHES.length] })));
      entry.append(one.name);
      legend.append(entry);
    });
    chart.levels.forEach((level) => {
      const entry = html("li", {});
      entry.append(sample(element("line", { x1: 0, x2: 26, y1: 6, y2: 6, stroke: "var(--warn)", "stroke-width": 2, "stroke-dasharray": "7 5" })));
      entry.append(`${level.name} ${fy(level.y)}`);
      legend.append(entry);
    });
    const readout = html("p", { class: "readout", "aria-live": "polite" });

    const places = chart.stack ? xs : [...new Set(all)].sort((a, b) => a - b);
    const nearest = (points, at) => {
      let low = 0, high = points.length - 1;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (points[middle] < at) low = middle + 1; else high = middle;
      }
      return low > 0 && at - points[low - 1] < points[low] - at ? low - 1 : low;
    };
    const read = (at) => {
      const place = nearest(places, at);
      view.at = places[place];
      cursor.setAttribute("visibility", "visible");
      cursor.setAttribute("x1", x(view.at));
      cursor.setAttribute("x2", x(view.at));
      readout.replaceChildren();
      const where = chart.names.length ? chart.names[place] : `${chart.xname} ${fx(view.at)}`;
      readout.append(html("b", {}, where || ""), ": ");
      const values = series.map((one) => {
        const index = chart.stack ? place : nearest(one.points.map((point) => point[0]), view.at);
        return [one.name, one.points[index][1]];
      });
      const parts = values.filter((value) => !chart.stack || value[1] > 0).map((value) => `${value[0]} ${fy(value[1])}`);
      if (chart.stack) parts.unshift(`all ${fy(values.reduce((sum, value) => sum + value[1], 0))}`);
      readout.append(parts.join(" · "));
    };
    const valueAt = (event) => {
      const box = svg.getBoundingClientRect();
      const at = (event.clientX - box.left) * width / box.width;
      return range[0] + Math.min(1, Math.max(0, (at - margin.left) / inner.width)) * (range[1] - range[0]);
    };
    let from = null;
    svg.addEventListener("pointerdown", (event) => { from = valueAt(event); });
    svg.addEventListener("pointermove", (event) => {
      const at = valueAt(event);
      read(at);
      if (from !== null && event.buttons) {
        const ends = [Math.min(from, at), Math.max(from, at)].map(x);
        picked.setAttribute("visibility", "visible");
        picked.setAttribute("x", ends[0]);
        picked.setAttribute("width", ends[1] - ends[0]);
      }
    });
    const release = (event) => {
      if (from === null) return;
      const ends = [from, valueAt(event)].sort((a, b) => a - b);
      from = null;
      picked.setAttribute("visibility", "hidden");
      if ((ends[1] - ends[0]) / (range[1] - range[0]) > 0.02) {
        view.range = ends;
        draw(figure);
      }
    };
    svg.addEventListener("pointerup", release);
    svg.addEventListener("pointerleave", () => { from = null; picked.setAttribute("visibility", "hidden"); });
    svg.addEventListener("dblclick", reset);
    figure.onkeydown = (event) => {
      if (event.target !== figure) return;
      const place = view.at === null ? -1 : nearest(places, view.at);
      const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 };
      if (event.key in steps) read(places[Math.min(places.length - 1, Math.max(0, place + steps[event.key]))]);
      else if (event.key === "Home") read(places[0]);
      else if (event.key === "End") read(places[places.length - 1]);
      else if (event.key === "+" || event.key === "=") zoom(0.5);
      else if (event.key === "-") zoom(2);
      else if (event.key === "0") reset();
      else return;
      event.preventDefault();
    };
    figure.append(tools, svg, legend, readout);
    if (view.at !== null) read(view.at);
  };

  const drawAll = () => document.querySelectorAll("figure.chart").forEach(draw);
  const themes = () => {
    const button = document.getElementById("theme");
    button.addEventListener("click", () => {
      const root = document.documentElement;
      const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = isDark ? "light" : "dark";
      button.setAttribute("aria-pressed", String(!isDark));
    });
  };
  let timer;
  addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(drawAll, 120); });
  themes();
  drawAll();

  const seconds = Number(document.documentElement.dataset.refresh);
  if (seconds > 0) {
    setInterval(async () => {
      try {
        const answer = await fetch("body");
        if (!answer.ok) return;
        const text = await answer.text();
        const kept = document.activeElement && document.activeElement.id;
        document.querySelector("main").outerHTML = text;
        themes();
        drawAll();
        const again = kept && document.getElementById(kept);
        if (again) again.focus({ preventScroll: true });
      } catch { /* the run's server has gone; the last state stays */ }
    }, seconds * 1000);
  }
})();
