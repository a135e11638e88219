// A chart as a file: its lines as SVG, its picture as PNG, its numbers as CSV.
import { colour, svg } from "../dom.js";
import { upText } from "./axes.js";
import { dashOf, lineColour } from "./plot.js";

function download(name, blob) {
	const link = document.createElement("a");
	link.href = URL.createObjectURL(blob);
	link.download = name.replace(/[^\w.-]+/g, "_");
	link.click();
	setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

const fileName = (chart, kind) => `${chart.tables.length === 1 ? `${chart.tables[0].label}-` : ""}${chart.title}.${kind}`;

/** Quoted where a spreadsheet would take it for something else. */
function field(value) {
	const text = String(value ?? "");
	return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : /^[=+@]/.test(text) ? `"'${text}"` : text;
}

export function csvOf(chart) {
	const lines = [["run", chart.x, "mean", "min", "max", "not_finite"]];
	for (const one of chart.tables) {
		one.x.forEach((x, place) => lines.push([one.label, x, one.mean[place], one.min[place], one.max[place], one.bad?.[place] ?? 0]));
	}
	return `${lines.map((line) => line.map(field).join(",")).join("\n")}\n`;
}

export function saveCsv(chart) {
	download(fileName(chart, "csv"), new Blob([csvOf(chart)], { type: "text/csv" }));
}

export function savePng(chart) {
	const drawn = chart.plot.under;
	const ratio = drawn.width / chart.plot.width;
	const canvas = document.createElement("canvas");
	[canvas.width, canvas.height] = [drawn.width, drawn.height + 26 * ratio];
	const context = canvas.getContext("2d");
	context.fillStyle = colour("surface");
	context.fillRect(0, 0, canvas.width, canvas.height);
	context.fillStyle = colour("text");
	context.font = `${13 * ratio}px system-ui, sans-serif`;
	context.fillText(`${chart.title}  ${chart.tables.map((one) => one.label).join(", ")}`, 10 * ratio, 18 * ratio);
	context.drawImage(drawn, 0, 26 * ratio);
	canvas.toBlob((blob) => download(fileName(chart, "png"), blob), "image/png");
}

/** The same places as on the screen, as paths. */
export function svgOf(chart) {
	const { plot } = chart;
	const [width, height] = [plot.width, plot.height + 30];
	const [x, y] = [(value) => plot.leftOf(value).toFixed(1), (value) => (plot.topOf(value) + 30).toFixed(1)];
	const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "font-family": "system-ui, sans-serif", "font-size": 11 },
		svg("rect", { width, height, fill: colour("surface") }), svg("text", { x: 12, y: 20, "font-size": 13, fill: colour("text") }, `${chart.title} ${chart.unit}`.trim()),
		plot.upTicks.map((one) => [svg("line", { x1: x(plot.scale.low), x2: x(plot.scale.high), y1: y(one), y2: y(one), stroke: colour("grid") }),
			svg("text", { x: 53, y: Number(y(one)) + 4, "text-anchor": "end", fill: colour("dim") }, upText(one, chart.unit))]),
		plot.acrossTicks.map(([one, text]) => svg("text", { x: x(one), y: height - 6, "text-anchor": "middle", fill: colour("dim") }, text)));
	chart.lines.forEach((one, place) => {
		const stroke = lineColour(one.place);
		const path = (values) => {
			let isDown = false;
			return (values ?? []).map((value, at) => {
				const isDrawn = value != null && !(chart.log && value <= 0);
				const text = isDrawn ? `${isDown ? "L" : "M"}${x(one.x[at])} ${y(value)}` : "";
				isDown = isDrawn;
				return text;
			}).join("");
		};
		for (const [d, wide, opacity] of [[path(one.min) + path(one.max), 0.6, 0.4], [path(one.mean), 1.4, one.smooth ? 0.5 : 1], [path(one.smooth), 2.2, 1]]) {
			if (d) root.append(svg("path", { d, fill: "none", stroke, "stroke-width": wide, "stroke-opacity": opacity, "stroke-dasharray": dashOf(one.place).join(" ") || null }));
		}
		root.append(svg("text", { x: width - 14, y: 18 + place * 13, "text-anchor": "end", fill: stroke }, one.label));
	});
	return new XMLSerializer().serializeToString(root);
}

export function saveSvg(chart) {
	download(fileName(chart, "svg"), new Blob([svgOf(chart)], { type: "image/svg+xml" }));
}
