// Before anything is drawn: the colours that were chosen last, so that a dark page does not flash white.
try {
	const chosen = localStorage.getItem("shoal.theme");
	if (chosen) document.documentElement.dataset.theme = chosen;
} catch { /* a browser that keeps nothing follows the system */ }
