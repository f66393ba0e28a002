"use strict"
// Search, hover and level of detail of the timeline. Texts of the log are only ever set as text, never as HTML.
;(() => {
  const DIMMED = 0.12
  const ROUTINE_GAP_PX = 9
  const LABEL_PX = 92
  const LABEL_LANE_PX = 17
  const TALL_LANE_PX = 44
  const ROUTINE_LANE_PX = 8
  const MOST_LABELS = 400
  const MOST_TIPS = 4
  const byId = (id) => document.getElementById(id)
  const data = JSON.parse(byId("data").textContent)
  const tip = byId("tip"), search = byId("search"), found = byId("found")
  const coloured = ["bars", ...data.links, ...data.kinds]
  const hovered = new Map()
  const switchedOff = new Set()
  let plot, model, stale, texts, matching, scheduled = 0
  let mouse = { x: 0, y: 0 }

  async function readTexts() {
    const packed = Uint8Array.from(atob(byId("texts").textContent), (letter) => letter.charCodeAt(0))
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"))
    return JSON.parse(await new Response(stream).text())
  }

  // Search

  function match(query) {
    const wanted = query.trim().toLowerCase()
    if (!wanted) return null
    return data.members.map(({ id, client }) => id.toLowerCase().includes(wanted) || client.toLowerCase().includes(wanted))
  }

  function showMatches() {
    matching = match(search.value)
    for (const name of coloured) {
      const source = model(name).data_source
      const { member, alpha, outline } = source.data
      for (let n = 0; n < alpha.length; n++) {
        alpha[n] = !matching || matching[member[n]] ? 1 : DIMMED
        if (outline?.[n]) outline[n] = alpha[n]
      }
      source.change.emit()
    }
    model("stale").data_source.data = matching ? chosen(stale, matching) : stale
    found.textContent = matching ? summary() : ""
  }

  function chosen(columns, matching) {
    const isChosen = (_, n) => matching[columns.member[n]]
    return Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values.filter(isChosen)]))
  }

  function summary() {
    const held = [...model("bars").data_source.data.member].filter((number) => matching[number])
    const runs = new Set(held.map((number) => data.members[number].id))
    const plural = (count, what) => `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`
    return held.length ? `${plural(held.length, "claim")} of ${plural(runs.size, "member")}` : "no claim matches"
  }

  // Not at each letter, because browsers limit how often an address may change.
  function remember() {
    location.replace(search.value ? `#run=${encodeURIComponent(search.value)}` : "#")
  }

  function zoomToMatches() {
    const { member, left, right } = model("bars").data_source.data
    let start = Infinity, end = -Infinity
    for (let n = 0; n < member.length; n++) {
      if (!matching?.[member[n]]) continue
      start = Math.min(start, left[n])
      end = Math.max(end, right[n])
    }
    if (start > end) return
    const margin = Math.max((end - start) / 10, 500)
    plot.x_range.setv({ start: start - margin, end: end + margin })
  }

  // Level of detail: routine marks and labels are drawn where there is room for them.

  function detail() {
    const width = plot.inner_width, height = plot.inner_height
    const { start, end } = plot.x_range
    const lanes = Math.abs(plot.y_range.end - plot.y_range.start)
    const lane = height / lanes
    const routine = data.routine.map((name) => model(name))
    const count = routine.reduce((sum, { data_source }) => sum + within(data_source.data.x, start, end), 0)
    const gap = (width * Math.min(lanes, data.lanes.length)) / count
    const isDense = count > 0 && (gap < ROUTINE_GAP_PX || lane < ROUTINE_LANE_PX)
    for (const name of data.kinds) {
      const renderer = model(name), isHidden = isDense && data.routine.includes(name)
      const size = Math.max(4, Math.min(11, Math.round(lane * 0.55)))
      if (renderer.glyph.size.value !== size) renderer.glyph.size = { value: size }
      renderer.visible = !switchedOff.has(name) && !isHidden
      document.querySelector(`[data-kind="${name}"]`)?.classList.toggle("dense", isHidden)
    }
    byId("hidden").hidden = !isDense
    label(start, end, width, lane)
  }

  function within(sorted, start, end) {
    return firstAbove(sorted, end) - firstAbove(sorted, start)
  }

  function firstAbove(sorted, value) {
    let low = 0, high = sorted.length
    while (low < high) {
      const middle = (low + high) >> 1
      if (sorted[middle] > value) high = middle
      else low = middle + 1
    }
    return low
  }

  function label(start, end, width, lane) {
    const { left, right, top, bottom, member } = model("bars").data_source.data
    const labels = { x: [], y: [], text: [], right: [], down: [] }
    const isTall = lane >= TALL_LANE_PX // above the marks then, else beside the first ones
    const pixel = (end - start) / width
    for (let n = 0; lane >= LABEL_LANE_PX && n < left.length; n++) {
      const from = Math.max(left[n], start), to = Math.min(right[n], end)
      if (to - from < LABEL_PX * pixel || (bottom[n] - top[n]) * lane < LABEL_LANE_PX * 0.6) continue
      if (labels.x.push(from) > MOST_LABELS) break
      const isAbove = isTall && (bottom[n] - top[n]) * lane > TALL_LANE_PX / 2
      labels.y.push(isAbove ? top[n] : (top[n] + bottom[n]) / 2)
      labels.right.push(isAbove ? 5 : 18)
      labels.down.push(isAbove ? 9 : 0)
      labels.text.push(data.members[member[n]].label)
    }
    const isTooMuch = labels.x.length > MOST_LABELS
    model("labels").data_source.data = isTooMuch ? { x: [], y: [], text: [], right: [], down: [] } : labels
  }

  function detailSoon() {
    clearTimeout(scheduled)
    scheduled = setTimeout(detail, 120)
  }

  // Hover

  function hover({ index, renderer }) {
    hovered.set(renderer.name, renderer.visible ? [...index.indices] : [])
    requestAnimationFrame(showTip)
  }

  function showTip() {
    const order = [...data.kinds, "bars", "pauses"]
    const hits = order.flatMap((name) => (hovered.get(name) ?? []).map((index) => [name, index]))
    tip.hidden = !hits.length || !texts
    if (tip.hidden) return
    tip.replaceChildren(...hits.slice(0, MOST_TIPS).map(([name, index]) => entry(texts[name][index])))
    if (hits.length > MOST_TIPS) tip.append(element("div", `and ${hits.length - MOST_TIPS} more: zoom in`))
    const { width, height } = tip.getBoundingClientRect()
    tip.style.left = `${Math.max(4, Math.min(mouse.x + 14, innerWidth - width - 8))}px`
    tip.style.top = `${mouse.y + 16 + height < innerHeight ? mouse.y + 16 : Math.max(4, mouse.y - height - 12)}px`
  }

  function entry(text) {
    const [when, sentence, ...more] = text.split("\n")
    const shown = element("div")
    shown.append(element("small", when), element("b", sentence), ...more.map((line) => element("small", line)))
    return shown
  }

  function element(name, text = "") {
    const made = document.createElement(name)
    made.textContent = text
    return made
  }

  function searchForBar() {
    const [index] = hovered.get("bars") ?? []
    if (index === undefined) return
    search.value = data.members[model("bars").data_source.data.member[index]].name
    showMatches()
    remember()
  }

  // WebGL that is computed without a GPU is slower than a plain canvas. Not every browser admits that it is.
  function hasGpu() {
    const gl = document.createElement("canvas").getContext("webgl", { failIfMajorPerformanceCaveat: true })
    if (!gl) return false
    const info = gl.getExtension("WEBGL_debug_renderer_info")
    const renderer = gl.getParameter(info ? info.UNMASKED_RENDERER_WEBGL : gl.RENDERER)
    return !/swiftshader|llvmpipe|softpipe|software|basic render/i.test(renderer)
  }

  async function begin() {
    const figure = JSON.parse(byId("figure").textContent)
    if (!hasGpu()) figure.doc.roots[0].attributes.output_backend = "canvas"
    await Bokeh.embed.embed_item(figure)
    const doc = Bokeh.documents[0]
    model = (name) => doc.get_model_by_name(name)
    plot = model("plot")
    stale = model("stale").data_source.data
    for (const range of [plot.x_range, plot.y_range]) {
      for (const side of ["start", "end"]) plot.connect(range.properties[side].change, detailSoon)
    }
    for (const side of ["inner_width", "inner_height"]) plot.connect(plot.properties[side].change, detailSoon)
    search.addEventListener("input", showMatches)
    search.addEventListener("change", remember)
    search.form.addEventListener("submit", (event) => {
      event.preventDefault()
      zoomToMatches()
    })
    const area = byId("plot")
    area.addEventListener("pointermove", (event) => { mouse = { x: event.clientX, y: event.clientY } }, true)
    area.addEventListener("pointerleave", () => { hovered.clear(); tip.hidden = true })
    let pressed = mouse
    area.addEventListener("pointerdown", (event) => { pressed = { x: event.clientX, y: event.clientY } }, true)
    area.addEventListener("click", (event) => {
      if (Math.hypot(event.clientX - pressed.x, event.clientY - pressed.y) < 4) searchForBar()
    }, true)
    for (const button of document.querySelectorAll("[data-kind]")) {
      button.addEventListener("click", () => {
        const kind = button.dataset.kind
        if (!switchedOff.delete(kind)) switchedOff.add(kind)
        button.setAttribute("aria-pressed", String(!switchedOff.has(kind)))
        detail()
      })
    }
    search.value = new URLSearchParams(location.hash.slice(1)).get("run") ?? ""
    if (search.value) showMatches()
    detail()
    requestAnimationFrame(() => requestAnimationFrame(() => {
      document.documentElement.dataset.paintedMs = String(Math.round(performance.now()))
    }))
    texts = await readTexts()
    document.documentElement.dataset.ready = "yes"
  }

  window.marshalTimeline = { hover }
  begin()
})()
