/* tool_format_xml.h - the ops of qwen3_coder, a format in tool_formats.c. Thread: its owner's. */
#ifndef BATON_TEXT_OUTPUT_TOOL_FORMAT_XML_H
#define BATON_TEXT_OUTPUT_TOOL_FORMAT_XML_H

#include "shared/text/output/tool_parser.h"

bool tool_xml_matches_template(struct str source);
enum tool_step tool_xml_step(struct tool_parser *p, bool last);
void tool_xml_begin(struct str name, struct buf *out);

#endif
