(() => {
  const root = document.getElementById("NAME"), run = DATA, n = run.ranks.length, last = run.moments.length - 1;
  const W = 760, col = W / n, top = 70, box = 46, NS = "http://www.w3.org/2000/svg";
  const most = Math.max(1, ...run.moments.flatMap((m) => m.holds.map((h) => Math.ceil(h.length / 2))));
  const low = top + box + 8 + 14 * most + 8, H = low + 16 * n + 14;
  let at = 0, timer = null;
  root.innerHTML = `<svg viewBox="0 0 ${W} ${H}" style="max-width:${W}px;width:100%;background:#fff" role="img"></svg>
    <div style="display:flex;gap:.5em;align-items:center;flex-wrap:wrap;max-width:${W}px">
    <button data-do="back" aria-label="step back">◀</button><button data-do="play" aria-label="play or pause">play</button>
    <button data-do="next" aria-label="step forward">▶</button>
    <input type="range" min="0" max="${last}" value="0" aria-label="step" style="flex:1;min-width:8em">
    <select aria-label="speed"><option value="1600">slow</option><option value="800" selected>normal</option>
    <option value="300">fast</option></select></div><p aria-live="polite" style="margin:.3em 0;font-size:90%"></p>`;
  const svg = root.querySelector("svg"), bar = root.querySelector("input"), words = root.querySelector("p");
  const add = (kind, attributes, text) => {
    const e = document.createElementNS(NS, kind);
    for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value);
    if (text !== undefined) e.textContent = text;
    svg.appendChild(e);
  };
  const say = (x, y, text, more) => add("text", { x, y, "font-size": 12, "font-family": "sans-serif", "text-anchor": "middle", ...more }, text);
  const time = (t) => 60 + (t / run.end) * (W - 70);
  const far = ([from, to]) => Math.abs(to - from);
  // Far ones are higher, and those to the left lie around those to the right: in an exchange no arc lies on another.
  function arc(send) {
    const [from, to] = send, [side, more] = to > from ? [24, 0] : [-8, 20];
    const lift = 16 + (32 * (far(send) - 1)) / Math.max(1, n - 2) + more;
    return [(from + 0.5) * col + side, (to + 0.5) * col - side, top - lift];
  }
  function arrow(send) {
    const [a, b, peak] = arc(send);
    add("path", { d: `M${a},${top} C${a},${peak} ${b},${peak} ${b},${top - 6}`, fill: "none", stroke: run.comm, "stroke-width": 2 });
    add("path", { d: `M${b - 5},${top - 9} L${b},${top - 1} L${b + 5},${top - 9} Z`, fill: run.comm });
  }
  // A text that a longer arrow over the same ranks says already is left out; of many messages the longest speaks.
  function label(send, i, sends) {
    const within = ([from, to, what]) => what === send[2] && Math.min(from, to) <= Math.min(send[0], send[1]) && Math.max(from, to) >= Math.max(send[0], send[1]);
    if (sends.slice(0, i).some(within) || (sends.length > n && i > 0)) return;
    const [a, b, peak] = arc(send);
    say((a + b) / 2, Math.max(11, (top + 3 * peak) / 4 - 4), send[2], { "font-size": 10, stroke: "#fff", "stroke-width": 4, "paint-order": "stroke" });
  }
  function draw() {
    const m = run.moments[at];
    svg.replaceChildren();
    m.work.forEach((work, r) => {
      const x = r * col + 10;
      add("rect", { x, y: top, width: col - 20, height: box, rx: 4, fill: work ? work[1] : "#fff", stroke: run.ranks[r], "stroke-width": 3 });
      say(r * col + col / 2, top + 18, `rank ${r}`, { "font-weight": "bold", fill: work ? work[2] : "#000" });
      say(r * col + col / 2, top + 36, work ? work[0] : "", { fill: work ? work[2] : "#000" });
      m.holds[r].forEach((name, i) =>
        say(x + (col - 20) * (m.holds[r].length === 1 ? 0.5 : i % 2 ? 0.75 : 0.25), top + box + 18 + 14 * Math.floor(i / 2), name, { "font-size": 11 }));
      say(30, low + 16 * r + 11, `rank ${r}`, { "font-size": 10, fill: run.ranks[r] });
    });
    m.sends.forEach(arrow);
    [...m.sends].sort((one, other) => far(other) - far(one)).forEach(label);
    run.bars.forEach(([r, , color, a, b]) => add("rect", { x: time(a), y: low + 16 * r + 2, width: Math.max(1, time(b) - time(a)), height: 8, fill: color }));
    run.sent.forEach(([r, a, b]) => add("rect", { x: time(a), y: low + 16 * r + 11, width: Math.max(1, time(b) - time(a)), height: 3, fill: run.comm }));
    const until = at < last ? run.moments[at + 1].t : run.end;
    add("rect", { x: time(m.t), y: low - 2, width: Math.max(2, time(until) - time(m.t)), height: 16 * n + 4, fill: "#000", opacity: 0.15 });
    bar.value = at;
    words.textContent = `step ${at + 1} of ${last + 1}, ${m.t.toFixed(0)} ms: ${m.words}`;
  }
  const go = (to) => { at = Math.min(last, Math.max(0, to)); draw(); };
  const stop = () => { clearInterval(timer); timer = null; root.querySelector("[data-do=play]").textContent = "play"; };
  function start() {
    if (at === last) at = -1;
    timer = setInterval(() => (at < last ? go(at + 1) : stop()), +root.querySelector("select").value);
    root.querySelector("[data-do=play]").textContent = "pause";
  }
  const acts = { back: () => (stop(), go(at - 1)), next: () => (stop(), go(at + 1)), play: () => (timer ? stop() : start()) };
  root.addEventListener("click", (e) => acts[e.target.dataset.do]?.());
  bar.addEventListener("input", () => { stop(); go(+bar.value); });
  root.querySelector("select").addEventListener("change", () => { if (timer) { stop(); start(); } });
  root.addEventListener("keydown", (e) => {
    if (e.target !== root) return;
    const act = { ArrowLeft: acts.back, ArrowRight: acts.next, " ": acts.play, Home: () => go(0), End: () => go(last) }[e.key];
    if (act) { e.preventDefault(); e.stopPropagation(); act(); }
  });
  draw();
})();
