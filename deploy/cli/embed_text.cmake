# Writes a C file that defines the text of a file as a constant, with a 0 byte at its end.
# usage: cmake -D FROM=TEXT -D TO=C_FILE -D NAME=IDENTIFIER -D HEADER=ITS_HEADER -P this
file(READ ${FROM} bytes HEX)
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
file(WRITE ${TO} "#include \"${HEADER}\"\n\nconst char ${NAME}[] = { ${bytes}0 };\n")
