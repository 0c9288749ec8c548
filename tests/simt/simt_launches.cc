/* simt_launches.cc - one line for each launch: its grid, threads of a block, bytes of dynamic shared
 * memory, and kernel. Thread: simt_launches.h. */
#include "tests/simt/simt_launches.h"

#include <stdio.h>
#include <stdlib.h>

#include <map>
#include <string>

#include "tests/simt/simt_block.h"
#include "tests/simt/simt_symbol.h"

static FILE *open_file(void)
{
    const char *path = getenv("BATON_SIMT_LAUNCHES");
    if (!path || !*path) return nullptr;
    FILE *f = fopen(path, "w");
    if (!f) simt_die("BATON_SIMT_LAUNCHES: %s cannot be written", path);
    return f;
}

static FILE *the_file(void)
{
    static FILE *const file = open_file();
    return file;
}

bool simt_notes_launches(void) { return the_file() != nullptr; }

bool simt_launch_is_noted(const simt_launch_shape &shape)
{
    static std::map<const void *, std::string> names;
    FILE *file = the_file();
    if (!file) return false;
    std::string &name = names[shape.kernel];
    if (name.empty()) {
        char text[300];
        simt_symbol(shape.kernel, text, sizeof text);
        name = text;
    }
    fprintf(file, "%u %u %u %u %zu %s\n", shape.grid.x, shape.grid.y, shape.grid.z,
            shape.block.x * shape.block.y * shape.block.z, shape.dynamic_shared, name.c_str());
    fflush(file);
    return true;
}
